"""X.509 certificates for one run, written and read as DER: a CA, and leaves whose names hold a role and a generation.

Only what OpenSSL's strict checks ask for (RFC 5280): SKI, AKI, critical basicConstraints and keyUsage, dates that no
wrong clock can miss. Reading is for leaves of our own making, after OpenSSL has verified them.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

from ppsmoke.cluster import p256
from ppsmoke.errors import LinkError

CA_NAME = "ppsmoke run CA"
GENERATION_PREFIX = "generation-"
# Laptops and rented hosts disagree about the time. A run's certificates end with its keys, not with a date.
NOT_BEFORE, NOT_AFTER = b"200101000000Z", b"99991231235959Z"

_EC_PUBLIC_KEY = "2a8648ce3d0201"
_PRIME256V1 = "2a8648ce3d030107"
_ECDSA_WITH_SHA256 = "2a8648ce3d040302"
_COMMON_NAME = "550403"
_BASIC_CONSTRAINTS, _KEY_USAGE, _SUBJECT_KEY_ID, _AUTHORITY_KEY_ID = "551d13", "551d0f", "551d0e", "551d23"
_SUBJECT_ALT_NAME = "551d11"

_BOOLEAN, _INTEGER, _BIT_STRING, _OCTET_STRING, _OID, _UTF8, _UTC_TIME, _TIME = 1, 2, 3, 4, 6, 12, 23, 24
_SEQUENCE, _SET = 0x30, 0x31


@dataclass(frozen=True)
class LeafNames:
    """What a leaf says about its holder: 65-byte public key, role, and which assignment of that role it is."""

    public_key: bytes
    role: str
    generation: int


def mint_ca(scalar: int) -> bytes:
    """The run's self-signed CA, DER."""
    public_key = p256.public_point(scalar)
    return _certificate(
        subject=CA_NAME, public_key=public_key, signer=scalar, signer_key=public_key, kind_extensions=_ca_extensions()
    )


def mint_leaf(public_key: bytes, *, role: str, generation: int, ca_scalar: int) -> bytes:
    """A leaf for public_key, signed by the CA, DER. Its common name is the role, its alternative names both facts."""
    return _certificate(
        subject=role,
        public_key=public_key,
        signer=ca_scalar,
        signer_key=p256.public_point(ca_scalar),
        kind_extensions=_leaf_extensions(role, generation),
    )


def private_key_der(scalar: int) -> bytes:
    """RFC 5915's ECPrivateKey."""
    return _sequence(
        _integer(1),
        _tlv(_OCTET_STRING, scalar.to_bytes(p256.SCALAR_BYTES, "big")),
        _tlv(0xA0, _oid(_PRIME256V1)),
        _tlv(0xA1, _bits(p256.public_point(scalar))),
    )


def pem(kind: str, der: bytes) -> str:
    body = base64.b64encode(der).decode()
    lines = [body[start : start + 64] for start in range(0, len(body), 64)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


def read_leaf(der: bytes) -> LeafNames:
    """The names in a leaf of ours. Raises LinkError for anything else."""
    try:
        (certificate,) = _children(der)
        to_be_signed = _children(_children(certificate[1])[0][1])
        # RFC 5280, 4.1: version, serial, algorithm, issuer, validity, subject, key, extensions
        key_info, extensions = _children(to_be_signed[6][1]), _children(_children(to_be_signed[7][1])[0][1])
        public_key = key_info[1][1][1:]
        names = [name.decode() for name in _alternative_names(extensions)]
        role, generation = names
        if len(public_key) != 65 or not generation.startswith(GENERATION_PREFIX):
            raise ValueError("not a leaf of ours")
        return LeafNames(public_key, role, int(generation.removeprefix(GENERATION_PREFIX)))
    except (ValueError, IndexError) as error:
        raise LinkError("a certificate that no ppsmoke run has made", reason="wrong-certificate") from error


def _certificate(
    *, subject: str, public_key: bytes, signer: int, signer_key: bytes, kind_extensions: list[bytes]
) -> bytes:
    algorithm = _sequence(_oid(_ECDSA_WITH_SHA256))
    key_info = _sequence(_sequence(_oid(_EC_PUBLIC_KEY), _oid(_PRIME256V1)), _bits(public_key))
    extensions = _sequence(
        *kind_extensions,
        _extension(_SUBJECT_KEY_ID, _tlv(_OCTET_STRING, _key_id(public_key))),
        _extension(_AUTHORITY_KEY_ID, _sequence(_tlv(0x80, _key_id(signer_key)))),
    )
    to_be_signed = _sequence(
        _tlv(0xA0, _integer(2)),
        _integer(int.from_bytes(hashlib.sha256(public_key + subject.encode()).digest()[:8], "big") | 1),
        algorithm,
        _name(CA_NAME),
        _sequence(_tlv(_UTC_TIME, NOT_BEFORE), _tlv(_TIME, NOT_AFTER)),
        _name(subject),
        key_info,
        _tlv(0xA3, extensions),
    )
    r, s = p256.sign(signer, to_be_signed)
    return _sequence(to_be_signed, algorithm, _bits(_sequence(_integer(r), _integer(s))))


def _ca_extensions() -> list[bytes]:
    path_length_0 = _sequence(_tlv(_BOOLEAN, b"\xff"), _integer(0))  # it signs leaves and no further CA
    certificate_sign = _tlv(_BIT_STRING, b"\x02\x04")
    return [_extension(_BASIC_CONSTRAINTS, path_length_0, critical=True)] + [
        _extension(_KEY_USAGE, certificate_sign, critical=True)
    ]


def _leaf_extensions(role: str, generation: int) -> list[bytes]:
    names = _sequence(_tlv(0x82, role.encode()), _tlv(0x82, f"{GENERATION_PREFIX}{generation}".encode()))
    digital_signature = _tlv(_BIT_STRING, b"\x07\x80")
    return [
        _extension(_BASIC_CONSTRAINTS, _sequence(), critical=True),
        _extension(_KEY_USAGE, digital_signature, critical=True),
        _extension(_SUBJECT_ALT_NAME, names),
    ]


def _alternative_names(extensions: list[tuple[int, bytes]]) -> list[bytes]:
    for _, extension in extensions:
        parts = _children(extension)
        if parts[0] == (_OID, bytes.fromhex(_SUBJECT_ALT_NAME)):
            (names,) = _children(parts[-1][1])
            return [value for tag, value in _children(names[1]) if tag == 0x82]
    raise ValueError("no alternative names")


def _key_id(public_key: bytes) -> bytes:
    return hashlib.sha256(public_key).digest()[:20]


def _name(common_name: str) -> bytes:
    return _sequence(_tlv(_SET, _sequence(_oid(_COMMON_NAME), _tlv(_UTF8, common_name.encode()))))


def _extension(oid: str, value: bytes, *, critical: bool = False) -> bytes:
    return _sequence(_oid(oid), _tlv(_BOOLEAN, b"\xff") if critical else b"", _tlv(_OCTET_STRING, value))


def _tlv(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 128:
        return bytes([tag, len(body)]) + body
    length = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + body


def _sequence(*parts: bytes) -> bytes:
    return _tlv(_SEQUENCE, *parts)


def _integer(value: int) -> bytes:
    return _tlv(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _oid(hex_body: str) -> bytes:
    return _tlv(_OID, bytes.fromhex(hex_body))


def _bits(value: bytes) -> bytes:
    return _tlv(_BIT_STRING, b"\x00", value)


def _children(body: bytes) -> list[tuple[int, bytes]]:
    """The (tag, value) pairs that body consists of. Raises ValueError or IndexError where it is no DER."""
    found, at = [], 0
    while at < len(body):
        tag, length, at = body[at], body[at + 1], at + 2
        if length >= 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(body[at : at + size], "big"), at + size
        if at + length > len(body):
            raise ValueError("a DER value runs over its end")
        found.append((tag, body[at : at + length]))
        at += length
    return found
