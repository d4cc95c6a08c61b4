"""What nodes tell each other about ways to reach a third: relay legs, punching, dialling back. Values and their bytes.

A signal travels in a SIGNAL frame on the link between two nodes. It may get lost with the link: whoever asked waits
with a deadline and asks again. None of them authorises anything.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields

from ppsmoke.cluster.addresses import is_ip
from ppsmoke.errors import FrameError, one_line

TOKEN_BYTES = 16
MAX_TARGETS = 6
MAX_TEXT_BYTES = 200


@dataclass(frozen=True)
class Connect:
    """To a relay: bring me together with that node."""

    to: str


@dataclass(frozen=True)
class Token:
    """From a relay to both: a leg with this token, within 10 s, leads to the peer. you_dial: dial me for it, else I
    dial you. you_start: in the link over it you are the one who dialled."""

    token: bytes
    peer: str
    you_dial: bool
    you_start: bool


@dataclass(frozen=True)
class NoLeg:
    """From a relay: no way to that peer through me, and why."""

    peer: str
    reason: str


@dataclass(frozen=True)
class LegClosed:
    """From a relay to both: the pair of legs with this token has ended, and which side ended it how."""

    token: bytes
    peer: str
    reason: str


@dataclass(frozen=True)
class PunchAsk:
    """To a relay: arrange a hole to that node."""

    to: str


@dataclass(frozen=True)
class Rendezvous:
    """From a relay to both: from one fresh port, probe me at the port you know and at second_port (0: there is none)
    with this attempt as the nonce, and tell me what came of it. Keep the connections open."""

    attempt: bytes
    peer: str
    second_port: int


@dataclass(frozen=True)
class Mapped:
    """To the relay: the port that the two probes left from, the round trip, and addresses that the peer could use if
    it sits behind the same public one. cause: why there was no probe, "" if all went well."""

    attempt: bytes
    local_port: int
    rtt_us: int
    hosts: tuple[tuple[str, int], ...]
    cause: str


@dataclass(frozen=True)
class PunchAt:
    """From a relay to both: connect from the probes' port to each of these in so many microseconds."""

    attempt: bytes
    peer: str
    delay_us: int
    targets: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class NoPunch:
    """From a relay: no hole to that peer. for_good: trying again changes nothing."""

    peer: str
    reason: str
    for_good: bool


@dataclass(frozen=True)
class DialBack:
    """Please probe that node at an address that it advertises."""

    number: int
    node: str
    host: str
    port: int


@dataclass(frozen=True)
class DialledBack:
    """What came of it; cause: "" if the node answered there."""

    number: int
    cause: str


Signal = (
    Connect | Token | NoLeg | LegClosed | PunchAsk | Rendezvous | Mapped | PunchAt | NoPunch | DialBack | DialledBack
)

# A code on the wire, and how each field travels: i node id, t token, b bool, H and I numbers, s text, l addresses.
_KINDS: dict[int, tuple[type, str]] = {
    1: (Connect, "i"),
    2: (Token, "tibb"),
    3: (NoLeg, "is"),
    4: (LegClosed, "tis"),
    5: (PunchAsk, "i"),
    6: (Rendezvous, "tiH"),
    7: (Mapped, "tHIls"),
    8: (PunchAt, "tiIl"),
    9: (NoPunch, "isb"),
    10: (DialBack, "IisH"),
    11: (DialledBack, "Is"),
}
_CODES = {kind: (code, layout) for code, (kind, layout) in _KINDS.items()}
_FIXED = {"b": struct.Struct("!B"), "H": struct.Struct("!H"), "I": struct.Struct("!I")}


def encode_signal(signal: Signal) -> bytes:
    code, layout = _CODES[type(signal)]
    parts = [bytes([code])]
    for field, how in zip(fields(signal), layout, strict=True):
        parts.append(_encode(how, getattr(signal, field.name)))
    return b"".join(parts)


def decode_signal(data: bytes) -> Signal:
    """Raises FrameError for anything that is no signal."""
    if not data or data[0] not in _KINDS:
        raise FrameError("a signal of unknown kind")
    kind, layout = _KINDS[data[0]]
    values, at = [], 1
    for how in layout:
        value, at = _decode(how, data, at)
        values.append(value)
    if at != len(data):
        raise FrameError(f"a {kind.__name__} signal with more behind it")
    return kind(*values)


def _encode(how: str, value: object) -> bytes:
    if how == "i":
        return bytes.fromhex(value)
    if how == "t":
        return value
    if how == "s":
        text = value.encode()[:MAX_TEXT_BYTES]
        return bytes([len(text)]) + text
    if how == "l":
        kept = value[:MAX_TARGETS]
        return bytes([len(kept)]) + b"".join(_encode("s", host) + _encode("H", port) for host, port in kept)
    return _FIXED[how].pack(value)


def _decode(how: str, data: bytes, at: int) -> tuple[object, int]:
    if how == "i":
        return _take(data, at, 8).hex(), at + 8
    if how == "t":
        return _take(data, at, TOKEN_BYTES), at + TOKEN_BYTES
    if how == "s":
        length = _take(data, at, 1)[0]
        return one_line(_take(data, at + 1, length).decode(errors="replace")), at + 1 + length
    if how == "l":
        return _decode_addresses(data, at)
    part = _FIXED[how]
    (value,) = part.unpack(_take(data, at, part.size))
    return (bool(value) if how == "b" else value), at + part.size


def _decode_addresses(data: bytes, at: int) -> tuple[tuple[tuple[str, int], ...], int]:
    count, at = _take(data, at, 1)[0], at + 1
    if count > MAX_TARGETS:
        raise FrameError(f"a signal with {count} addresses")
    found = []
    for _ in range(count):
        host, at = _decode("s", data, at)
        port, at = _decode("H", data, at)
        if not is_ip(host):  # a hole leads to an address; a name would have us ask a resolver of its owner's choice
            raise FrameError(f"a signal with {host[:80]!r} for an address")
        found.append((host, port))
    return tuple(found), at


def _take(data: bytes, at: int, count: int) -> bytes:
    if at + count > len(data):
        raise FrameError("a signal that ends early")
    return data[at : at + count]
