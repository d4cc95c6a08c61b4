"""SWIM's packets as bytes: a head by kind, then updates to the end. Knows no rule, keeps no state.

Who sent a packet, and in which life, stands in the seal (UDP) or is known of the link; it is not repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from ppsmoke.cluster.names import MAX_NAME_BYTES, MAX_VALUE_BYTES, NameEntry
from ppsmoke.cluster.swim_state import State
from ppsmoke.errors import FrameError

ID_BYTES = 8
DIGEST_BYTES = 8
MAX_META_BYTES = 512
MAX_PAYLOAD_BYTES = 1 << 16  # over a link; a datagram is far smaller
NOBODY = ""  # an accuser where there is none

_HEAD = Struct("!BBI")  # kind, flags, the sender's incarnation
_HEARS_UDP = 1
_PING = Struct("!II8s")
_ACK = Struct("!I8s")
_PING_REQUEST = Struct("!I8sH")
_NACK = Struct("!I")
_FORWARDED_ACK = Struct("!I8s")
_SYNC = Struct("!IB")
_STALE = Struct("!QQ")
_MEMBER = Struct("!BB8sQI8sH")
_NAME = Struct("!BBBI8sQIH")
_MEMBER_TYPE, _NAME_TYPE = 1, 2


class PacketError(FrameError):
    """Bytes that are no SWIM packet."""


class Ping(NamedTuple):
    """Answer with Ack(seq). round: the prober's place in the rotation that all members share."""

    seq: int
    round: int
    digest: bytes


class Ack(NamedTuple):
    seq: int
    digest: bytes


class PingRequest(NamedTuple):
    """Ping the target for us; Nack after wait_ms without an answer."""

    seq: int
    target: str
    wait_ms: int


class Nack(NamedTuple):
    """We, the helper, are well; the target has not answered so far."""

    seq: int


class ForwardedAck(NamedTuple):
    seq: int
    target: str


class Gossip(NamedTuple):
    """Nothing but updates."""


class Sync(NamedTuple):
    """A part of everything the sender knows (push/pull); whoever wants a reply gets the same back, once a seq."""

    seq: int
    wants_reply: bool


class Stale(NamedTuple):
    """We know a later life of you (`known`) than the one you speak from (`seen`)."""

    seen: int
    known: int


class MemberUpdate(NamedTuple):
    """accuser: who suspects or buried it, or NOBODY. meta: opaque bytes of its owner, on alive and in a sync."""

    state: State
    node_id: str
    epoch: int
    incarnation: int
    accuser: str = NOBODY
    meta: bytes = b""


Body = Ping | Ack | PingRequest | Nack | ForwardedAck | Gossip | Sync | Stale
Update = MemberUpdate | NameEntry


class Packet(NamedTuple):
    """hears_udp: the sender got a datagram of ours lately."""

    incarnation: int
    hears_udp: bool
    body: Body
    updates: Sequence[Update] = ()


_KINDS: tuple[type, ...] = (Ping, Ack, PingRequest, Nack, ForwardedAck, Gossip, Sync, Stale)
_KIND_OF = {kind: number for number, kind in enumerate(_KINDS, start=1)}


def encode_head(incarnation: int, hears_udp: bool, body: Body) -> bytes:
    """The packet without its updates, which follow as they are (encode_update)."""
    head = _HEAD.pack(_KIND_OF[type(body)], _HEARS_UDP if hears_udp else 0, incarnation)
    match body:
        case Ping(seq, round, digest):
            return head + _PING.pack(seq, round, digest)
        case Ack(seq, digest):
            return head + _ACK.pack(seq, digest)
        case PingRequest(seq, target, wait_ms):
            return head + _PING_REQUEST.pack(seq, _id(target), wait_ms)
        case Nack(seq):
            return head + _NACK.pack(seq)
        case ForwardedAck(seq, target):
            return head + _FORWARDED_ACK.pack(seq, _id(target))
        case Sync(seq, wants_reply):
            return head + _SYNC.pack(seq, wants_reply)
        case Stale(seen, known):
            return head + _STALE.pack(seen, known)
    return head


def encode_update(update: Update) -> bytes:
    if isinstance(update, MemberUpdate):
        state, node_id, epoch, incarnation, accuser, meta = update
        accuser_id = _id(accuser) if accuser else bytes(ID_BYTES)
        return _MEMBER.pack(_MEMBER_TYPE, state, _id(node_id), epoch, incarnation, accuser_id, len(meta)) + meta
    name = update.name.encode()
    numbers = (update.generation, _id(update.owner), update.owner_epoch, update.version, len(update.value))
    return _NAME.pack(_NAME_TYPE, update.deleted, len(name), *numbers) + name + update.value


def encode(packet: Packet) -> bytes:
    head = encode_head(packet.incarnation, packet.hears_udp, packet.body)
    return head + b"".join(encode_update(update) for update in packet.updates)


def decode(data: bytes) -> Packet:
    """Raises PacketError on anything that encode cannot have written; never allocates what a length claims."""
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PacketError(f"a packet of {len(data)} bytes, at most {MAX_PAYLOAD_BYTES} are allowed", reason="oversized")
    try:
        kind, flags, incarnation = _HEAD.unpack_from(data)
        if not 1 <= kind <= len(_KINDS):
            raise PacketError(f"unknown packet kind {kind}", reason="unknown-kind")
        if flags & ~_HEARS_UDP:
            raise PacketError(f"unknown packet flags {flags:#x}", reason="unknown-flags")
        body, offset = _decode_body(_KINDS[kind - 1], data)
        updates = []
        while offset < len(data):
            update, offset = _decode_update(data, offset)
            updates.append(update)
    except StructError:
        raise PacketError(f"a packet of {len(data)} bytes ends within a field", reason="truncated") from None
    return Packet(incarnation, bool(flags & _HEARS_UDP), body, updates)


def _decode_body(kind: type, data: bytes) -> tuple[Body, int]:
    at = _HEAD.size
    if kind is Ping:
        return Ping(*_PING.unpack_from(data, at)), at + _PING.size
    if kind is Ack:
        return Ack(*_ACK.unpack_from(data, at)), at + _ACK.size
    if kind is PingRequest:
        seq, target, wait_ms = _PING_REQUEST.unpack_from(data, at)
        return PingRequest(seq, target.hex(), wait_ms), at + _PING_REQUEST.size
    if kind is Nack:
        return Nack(*_NACK.unpack_from(data, at)), at + _NACK.size
    if kind is ForwardedAck:
        seq, target = _FORWARDED_ACK.unpack_from(data, at)
        return ForwardedAck(seq, target.hex()), at + _FORWARDED_ACK.size
    if kind is Sync:
        seq, wants_reply = _SYNC.unpack_from(data, at)
        return Sync(seq, _flag(wants_reply, "wants_reply")), at + _SYNC.size
    if kind is Stale:
        return Stale(*_STALE.unpack_from(data, at)), at + _STALE.size
    return Gossip(), at


def _decode_update(data: bytes, at: int) -> tuple[Update, int]:
    if data[at] == _MEMBER_TYPE:
        _, state, node_id, epoch, incarnation, accuser, length = _MEMBER.unpack_from(data, at)
        if state > State.LEFT:
            raise PacketError(f"unknown member state {state}", reason="unknown-state")
        if length > MAX_META_BYTES:
            raise PacketError(f"meta of {length} bytes, at most {MAX_META_BYTES} are allowed", reason="oversized")
        meta, end = _cut(data, at + _MEMBER.size, length)
        accuser_id = accuser.hex() if any(accuser) else NOBODY
        return MemberUpdate(State(state), node_id.hex(), epoch, incarnation, accuser_id, meta), end
    if data[at] == _NAME_TYPE:
        _, deleted, length, generation, owner, epoch, version, value_length = _NAME.unpack_from(data, at)
        if not 0 < length <= MAX_NAME_BYTES or value_length > MAX_VALUE_BYTES:
            raise PacketError(f"a name of {length} bytes with a value of {value_length}", reason="oversized")
        raw, middle = _cut(data, at + _NAME.size, length)
        value, end = _cut(data, middle, value_length)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise PacketError("a name that is not UTF-8", reason="bad-name") from None
        return NameEntry(name, owner.hex(), epoch, version, generation, value, _flag(deleted, "deleted")), end
    raise PacketError(f"unknown update type {data[at]}", reason="unknown-update")


def _cut(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    if at + length > len(data):
        raise PacketError(f"{length} bytes claimed, {len(data) - at} left", reason="truncated")
    return data[at : at + length], at + length


def _flag(value: int, what: str) -> bool:
    if value > 1:
        raise PacketError(f"{what} is {value}, not 0 or 1", reason="unknown-flags")
    return bool(value)


def _id(node_id: str) -> bytes:
    return bytes.fromhex(node_id)
