"""The wire: golden bytes, cuts, and bytes from strangers."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from ppsmoke.cluster.names import NameEntry
from ppsmoke.cluster.swim_packets import (
    MAX_META_BYTES,
    MAX_PAYLOAD_BYTES,
    Ack,
    ForwardedAck,
    Gossip,
    MemberUpdate,
    Nack,
    Packet,
    PacketError,
    Ping,
    PingRequest,
    Stale,
    Sync,
    decode,
    encode,
)
from ppsmoke.cluster.swim_state import State

A, B = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
DIGEST = bytes(range(8))
ALIVE = MemberUpdate(State.ALIVE, A, 1_800_000_000_000, 2, meta=b"meta")
SUSPECT = MemberUpdate(State.SUSPECT, A, 5, 0, B)
NAME = NameEntry("pp-entry", B, 6, 1, 3, b"stage")
GOLDEN = [
    (Packet(0, False, Ping(1, 7, DIGEST)), "01 00 00000000 00000001 00000007 0001020304050607"),
    (Packet(9, True, Ack(1, DIGEST)), "02 01 00000009 00000001 0001020304050607"),
    (Packet(0, False, PingRequest(2, B, 400)), "03 00 00000000 00000002 bbbbbbbbbbbbbbbb 0190"),
    (Packet(0, False, Nack(2)), "04 00 00000000 00000002"),
    (Packet(0, False, ForwardedAck(2, B)), "05 00 00000000 00000002 bbbbbbbbbbbbbbbb"),
    (
        Packet(0, False, Gossip(), [ALIVE]),
        "06 00 00000000 01 00 aaaaaaaaaaaaaaaa 000001a3185c5000 00000002 0000000000000000 0004 6d657461",
    ),
    (
        Packet(0, False, Sync(3, True), [SUSPECT, NAME]),
        "07 00 00000000 00000003 01"
        "01 01 aaaaaaaaaaaaaaaa 0000000000000005 00000000 bbbbbbbbbbbbbbbb 0000"
        "02 00 08 00000003 bbbbbbbbbbbbbbbb 0000000000000006 00000001 0005 70702d656e747279 7374616765",
    ),
    (Packet(0, False, Stale(5, 6)), "08 00 00000000 0000000000000005 0000000000000006"),
]


@pytest.mark.parametrize(("packet", "golden"), GOLDEN, ids=[type(packet.body).__name__ for packet, _ in GOLDEN])
def test_each_packet_is_these_bytes_and_nothing_else(packet, golden):
    data = bytes.fromhex(golden)
    assert encode(packet) == data
    decoded = decode(data)
    assert decoded._replace(updates=list(decoded.updates)) == packet._replace(updates=list(packet.updates))


@pytest.mark.parametrize(("packet", "golden"), GOLDEN, ids=[type(packet.body).__name__ for packet, _ in GOLDEN])
def test_a_packet_cut_anywhere_is_refused_or_is_a_shorter_one(packet, golden):
    data = bytes.fromhex(golden)
    whole_prefixes = {encode(packet._replace(updates=packet.updates[:count])) for count in range(len(packet.updates))}
    for cut in range(len(data)):
        if data[:cut] in whole_prefixes:
            decode(data[:cut])
            continue
        with pytest.raises(PacketError) as error:
            decode(data[:cut])
        assert error.value.reason == "truncated"


def member_bytes(**fields: int) -> bytes:
    values = {"state": 0, "meta_length": 0, **fields}
    head = bytes([1, values["state"]]) + bytes(8) + bytes(8) + bytes(4) + bytes(8)
    return bytes.fromhex("06 00 00000000") + head + values["meta_length"].to_bytes(2, "big")


def name_bytes(raw: bytes, *, deleted: int = 0, value_length: int = 0) -> bytes:
    head = bytes([2, deleted, len(raw)]) + bytes(24) + value_length.to_bytes(2, "big")
    return bytes.fromhex("06 00 00000000") + head + raw


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes.fromhex("00 00 00000000"), "unknown-kind"),
        (bytes.fromhex("09 00 00000000"), "unknown-kind"),
        (bytes.fromhex("06 02 00000000"), "unknown-flags"),
        (bytes.fromhex("07 00 00000000 00000001 02"), "unknown-flags"),
        (bytes.fromhex("06 00 00000000 03"), "unknown-update"),
        (member_bytes(state=4), "unknown-state"),
        (member_bytes(meta_length=MAX_META_BYTES + 1), "oversized"),
        (member_bytes(meta_length=MAX_META_BYTES), "truncated"),
        (name_bytes(b""), "oversized"),
        (name_bytes(b"n" * 65), "oversized"),
        (name_bytes(b"n", value_length=129), "oversized"),
        (name_bytes(b"n", value_length=128), "truncated"),
        (name_bytes(b"n", deleted=2), "unknown-flags"),
        (name_bytes(b"\xff"), "bad-name"),
        (bytes(MAX_PAYLOAD_BYTES + 1), "oversized"),
    ],
)
def test_what_no_member_would_write_is_refused_by_name(data, reason):
    with pytest.raises(PacketError) as error:
        decode(data)
    assert error.value.reason == reason


def mutated(generator: random.Random) -> bytes:
    data = bytearray(bytes.fromhex(generator.choice(GOLDEN)[1]) * generator.choice((1, 1, 1, 40)))
    for _ in range(generator.randrange(1, 6)):
        match generator.randrange(4):
            case 0:
                data[generator.randrange(len(data))] = generator.randrange(256)
            case 1:
                del data[generator.randrange(len(data)) :]
                data += b"\x01"
            case 2:
                at = generator.randrange(len(data))
                data[at:at] = generator.randbytes(generator.randrange(20))
            case _:
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data)


def fuzz(seed: int, count: int) -> None:
    generator = random.Random(seed)
    decoded = 0
    for _ in range(count):
        data = mutated(generator)
        try:
            packet = decode(data)
        except PacketError:
            continue
        decoded += 1
        assert encode(packet) == data  # what is let in has one form only
    assert decoded > count // 100


@pytest.mark.parametrize("seed", range(4))
def test_mutated_packets_decode_or_are_refused(seed):
    fuzz(seed, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_million_mutated_packets_decode_or_are_refused(seed):
    fuzz(1000 + seed, 250_000)


def test_decoding_allocates_no_more_than_a_small_multiple_of_what_came():
    data = bytes.fromhex("06 00 00000000") + bytes.fromhex(GOLDEN[5][1])[6:] * 1500
    tracemalloc.start()
    decode(data[:MAX_PAYLOAD_BYTES][: 6 + 36 * 1500])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(data)
