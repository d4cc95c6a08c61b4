"""The curve P-256 and deterministic ECDSA on it, with whole numbers alone: enough to sign a few certificates per run.

Not constant in time, so it signs only where the signer's own machine is the only observer. TLS itself is OpenSSL's.
"""

from __future__ import annotations

import hashlib
import hmac

# SEC 2, section 2.4.2 (secp256r1): the field, the group's order, the base point. a = -3.
FIELD = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE_POINT = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
SCALAR_BYTES = 32


def public_point(scalar: int) -> bytes:
    """scalar times the base point, uncompressed: 65 bytes, 4 and both coordinates."""
    x, y = _times_base(scalar)
    return b"\x04" + x.to_bytes(SCALAR_BYTES, "big") + y.to_bytes(SCALAR_BYTES, "big")


def scalar_from(seed: bytes) -> int:
    """A private scalar in 1..ORDER-1 from 48 or more uniform bytes (FIPS 186-5, A.2.1: the bias is below 2**-120)."""
    if len(seed) < 48:
        raise ValueError("a scalar needs 48 bytes of seed")
    return int.from_bytes(seed, "big") % (ORDER - 1) + 1


def sign(scalar: int, message: bytes) -> tuple[int, int]:
    """ECDSA with SHA-256 over message: (r, s). The nonce is RFC 6979's, so the same input gives the same signature."""
    digest = hashlib.sha256(message).digest()
    for nonce in _nonces(scalar, digest):
        r = _times_base(nonce)[0] % ORDER
        s = pow(nonce, -1, ORDER) * (int.from_bytes(digest, "big") + r * scalar) % ORDER
        if r and s:
            return r, s
    raise AssertionError("unreachable: RFC 6979 has a nonce for every message")


def _nonces(scalar: int, digest: bytes):
    """RFC 6979, section 3.2: HMAC-DRBG over the key and the digest."""

    def mac(key: bytes, data: bytes) -> bytes:
        return hmac.new(key, data, hashlib.sha256).digest()

    reduced = int.from_bytes(digest, "big") % ORDER
    seed = scalar.to_bytes(SCALAR_BYTES, "big") + reduced.to_bytes(SCALAR_BYTES, "big")
    key, value = b"\x00" * 32, b"\x01" * 32
    for separator in (b"\x00", b"\x01"):
        key = mac(key, value + separator + seed)
        value = mac(key, value)
    while True:
        value = mac(key, value)
        candidate = int.from_bytes(value, "big")
        if 1 <= candidate < ORDER:
            yield candidate
        key = mac(key, value + b"\x00")
        value = mac(key, value)


def _times_base(scalar: int) -> tuple[int, int]:
    """Double and add from the top bit, in Jacobian coordinates (x = X/Z^2, y = Y/Z^3): one inversion at the end."""
    if not 1 <= scalar < ORDER:
        raise ValueError("a private scalar lies in 1..ORDER-1")
    point = (1, 1, 0)
    for bit in bin(scalar)[2:]:
        point = _double(*point)
        if bit == "1":
            point = _add_base(*point)
    x, y, z = point
    inverse = pow(z, -1, FIELD)
    return x * inverse * inverse % FIELD, y * inverse * inverse * inverse % FIELD


def _double(x: int, y: int, z: int) -> tuple[int, int, int]:
    """Explicit-Formulas Database, dbl-2001-b, for a = -3."""
    delta, gamma = z * z % FIELD, y * y % FIELD
    beta = x * gamma % FIELD
    alpha = 3 * (x - delta) * (x + delta) % FIELD
    x3 = (alpha * alpha - 8 * beta) % FIELD
    return x3, (alpha * (4 * beta - x3) - 8 * gamma * gamma) % FIELD, 2 * y * z % FIELD


def _add_base(x1: int, y1: int, z1: int) -> tuple[int, int, int]:
    """(x1, y1, z1) plus the base point, which has Z = 1."""
    x2, y2 = BASE_POINT
    if z1 == 0:
        return x2, y2, 1
    z1_squared = z1 * z1 % FIELD
    h = (x2 * z1_squared - x1) % FIELD
    r = (y2 * z1_squared * z1 - y1) % FIELD
    if h == 0:
        return _double(x1, y1, z1) if r == 0 else (1, 1, 0)
    h_squared = h * h % FIELD
    h_cubed, v = h * h_squared % FIELD, x1 * h_squared % FIELD
    x3 = (r * r - h_cubed - 2 * v) % FIELD
    return x3, (r * (v - x3) - y1 * h_cubed) % FIELD, z1 * h % FIELD
