"""Key derivation, open to every room. One secret per run; every other key says what it is for."""

from __future__ import annotations

import hashlib
import hmac
import secrets

KEY_BYTES = 32
_SALT = b"ppsmoke/1"


def new_run_key() -> bytes:
    """32 random bytes that never leave the orchestrator."""
    return secrets.token_bytes(KEY_BYTES)


def derive(secret: bytes, label: str, length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256 (RFC 5869) of the secret with a fixed salt; label is its `info`, at most 255 * 32 bytes out."""
    extracted = hmac.new(_SALT, secret, hashlib.sha256).digest()
    block, out, counter = b"", b"", 1
    while len(out) < length:
        block = hmac.new(extracted, block + label.encode() + bytes([counter]), hashlib.sha256).digest()
        out += block
        counter += 1
    return out[:length]
