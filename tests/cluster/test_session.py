from __future__ import annotations

import random
import struct

import pytest

from ppsmoke.cluster.frames import MAX_PAYLOAD_BYTES, Frame, FrameFlags, FrameType
from ppsmoke.cluster.handshake import Resume
from ppsmoke.cluster.session import ACK_AT_BYTES, MAX_MESSAGE_BYTES, Arrival, Chunk, Session
from ppsmoke.errors import FrameError, MessageError

BOTH = FrameFlags.FIRST | FrameFlags.LAST


def frame_of(chunk: Chunk) -> Frame:
    return Frame(FrameType.DATA, chunk.flags, chunk.sequence, bytes(chunk.payload))


def attach(one: Session, other: Session, epochs: tuple[int, int] = (1, 2)) -> None:
    """A new link between the two: each learns what the other's HELLO says."""
    for_one, for_other = other.resume(0), one.resume(0)
    one.attach(peer_epoch=epochs[1], peer_resume=for_one)
    other.attach(peer_epoch=epochs[0], peer_resume=for_other)


def pair(window_bytes: int = 1 << 20) -> tuple[Session, Session]:
    one, other = Session(epoch=1, window_bytes=window_bytes), Session(epoch=2)
    attach(one, other)
    return one, other


def sent(session: Session) -> list[Frame]:
    frames = []
    while (chunk := session.next_chunk()) is not None:
        frames.append(frame_of(chunk))
    return frames


def test_a_message_arrives_as_it_was_offered():
    one, other = pair()
    one.offer("stage", [b"acti", b"", b"vation"])
    (frame,) = sent(one)
    assert other.on_chunk(frame) == Arrival("stage", b"activation")


@pytest.mark.parametrize("size", [0, 1, MAX_PAYLOAD_BYTES - 11, MAX_PAYLOAD_BYTES - 10, MAX_PAYLOAD_BYTES, 300_000])
def test_sizes_around_the_chunk_are_cut_and_put_together(size):
    one, other = pair()
    payload = random.Random(size).randbytes(size)
    one.offer("stage", [payload])
    frames = sent(one)
    assert all(len(frame.payload) <= MAX_PAYLOAD_BYTES for frame in frames)
    assert [arrival for frame in frames if (arrival := other.on_chunk(frame))] == [Arrival("stage", payload)]


def test_what_was_acknowledged_leaves_the_window_and_what_was_never_sent_cannot_be():
    one, other = pair(window_bytes=1000)
    one.offer("stage", [bytes(2000)])
    assert not one.has_room
    with pytest.raises(FrameError, match="never sent"):
        one.on_ack(1)
    (frame,) = sent(one)
    other.on_chunk(frame)
    one.on_ack(other.take_ack())
    assert one.has_room and one.idle and one.unacked_bytes == 0 and other.take_ack() is None


def test_an_ack_is_due_at_once_only_after_many_bytes():
    one, other = pair(window_bytes=8 << 20)
    one.offer("stage", [bytes(ACK_AT_BYTES)])
    frames = sent(one)
    for frame in frames[:3]:  # of four full chunks and a rest
        other.on_chunk(frame)
    assert other.owes_ack and not other.owes_ack_now
    other.on_chunk(frames[3])
    assert other.owes_ack_now


def test_a_new_link_brings_what_is_missing_and_nothing_arrives_twice():
    one, other = pair()
    for number in range(5):
        one.offer("stage", [b"%d" % number])
    frames = sent(one)
    arrived = [other.on_chunk(frame) for frame in frames[:3]]  # the link dies; 0 to 2 have come, no ACK went back
    attach(one, other)
    again = sent(one)
    assert [frame.sequence for frame in again] == [4, 5]
    assert other.on_chunk(frames[2]) is None and other.duplicates == 1  # the old link had one more in flight
    arrived += [other.on_chunk(frame) for frame in again]
    assert [arrival.payload for arrival in arrived] == [b"0", b"1", b"2", b"3", b"4"]


def test_an_old_link_may_acknowledge_what_the_new_one_was_to_send_again():
    one, other = pair()
    one.offer("stage", [b"x"])
    stale = other.resume(0)
    (frame,) = sent(one)
    other.on_chunk(frame)
    one.attach(peer_epoch=2, peer_resume=stale)
    one.on_ack(1)
    assert one.next_chunk() is None and one.idle


def test_a_peer_in_a_new_life_gets_nothing_that_was_meant_for_the_old_one():
    one, other = pair()
    one.offer("stage", [b"for the old life"])
    sent(one)
    reborn = Session(epoch=3)
    for_one, for_reborn = reborn.resume(0), one.resume(0)
    assert one.attach(peer_epoch=3, peer_resume=for_one)
    assert not reborn.attach(peer_epoch=1, peer_resume=for_reborn)
    assert one.idle and one.dropped_chunks == 1
    one.offer("stage", [b"for the new one"])
    (frame,) = sent(one)
    assert frame.sequence == 1 and reborn.on_chunk(frame) == Arrival("stage", b"for the new one")


HEAD = struct.pack("!IB", 3, 5) + b"stage"


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Frame(FrameType.DATA, BOTH, 2, HEAD + b"abc"), "chunk 2 after chunk 0"),
        (Frame(FrameType.DATA, FrameFlags.LAST, 1, b"abc"), "without a start"),
        (Frame(FrameType.DATA, BOTH, 1, b"abc"), "without a head"),
        (Frame(FrameType.DATA, BOTH, 1, HEAD + b"ab"), "not as long"),
        (Frame(FrameType.DATA, BOTH, 1, HEAD + b"abcd"), "not as long"),
        (Frame(FrameType.DATA, FrameFlags.FIRST, 1, HEAD + b"abc"), "not as long"),
        (Frame(FrameType.DATA, BOTH, 1, struct.pack("!IB", 0xFFFFFFFF, 5) + b"stage"), "claims 4,294,967,295"),
        (Frame(FrameType.DATA, BOTH, 1, struct.pack("!IB", 0, 0)), "name of 0"),
        (Frame(FrameType.DATA, BOTH, 1, struct.pack("!IB", 0, 9) + b"short"), "name of 9"),
        (Frame(FrameType.DATA, BOTH, 1, struct.pack("!IB", 0, 2) + b"\xff\xfe"), "UTF-8"),
    ],
)
def test_an_impossible_chunk_is_refused_and_changes_nothing(frame, says):
    one, other = pair()
    with pytest.raises(FrameError, match=says):
        other.on_chunk(frame)
    assert not other.owes_ack
    one.offer("stage", [b"abc"])
    assert other.on_chunk(sent(one)[0]) == Arrival("stage", b"abc")


@pytest.mark.parametrize("flags", [FrameFlags.FIRST, FrameFlags.NONE])
def test_a_message_cannot_start_within_another_nor_go_on_with_nothing(flags):
    _, other = pair()
    other.on_chunk(Frame(FrameType.DATA, FrameFlags.FIRST, 1, HEAD))
    payload = HEAD if flags else b""
    with pytest.raises(FrameError, match="within another|brings nothing"):
        other.on_chunk(Frame(FrameType.DATA, flags, 2, payload))


@pytest.mark.parametrize("mailbox", ["", "x" * 65])
def test_a_mailbox_name_that_does_not_fit_is_refused(mailbox):
    with pytest.raises(MessageError, match="1 to 64 bytes"):
        Session(epoch=1).offer(mailbox, [b""])


def test_a_message_that_no_peer_would_take_is_refused_whole():
    session = Session(epoch=1)
    piece = bytes(1 << 20)
    with pytest.raises(MessageError, match="the most"):
        session.offer("stage", [piece] * (MAX_MESSAGE_BYTES // len(piece)) + [b"x"])
    assert session.idle


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 100))])
def test_whatever_links_die_every_message_arrives_once_and_in_order(seed):
    """Two sessions talk over links that deliver a part of what is in flight, die, and are replaced at random, while
    the old link may still bring what it held."""
    rng = random.Random(seed)
    sessions = pair(window_bytes=4 << 20)
    offered: list[list[bytes]] = [[], []]
    arrived: list[list[bytes]] = [[], []]
    links: list[list[list[tuple[str, object]]]] = [[[], []]]  # of each link what is in flight to side 0 and 1

    def pump(side: int) -> None:
        for frame in sent(sessions[side]):
            links[-1][1 - side].append(("data", frame))
        if (received := sessions[side].take_ack()) is not None and rng.random() < 0.7:
            links[-1][1 - side].append(("ack", received))

    def deliver(link: list[list[tuple[str, object]]], side: int) -> None:
        kind, value = link[side].pop(0)
        if kind == "ack":
            sessions[side].on_ack(value)
        elif (arrival := sessions[side].on_chunk(value)) is not None:
            arrived[side].append(arrival.payload)

    def step() -> None:
        side = rng.randrange(2)
        choice = rng.random()
        if choice < 0.3:
            message = rng.randbytes(rng.choice([0, 10, 4096, 70_000, 200_000]))
            offered[side].append(message)
            sessions[side].offer("box", [message])
        elif choice < 0.6:
            pump(side)
        elif choice < 0.95:
            link = rng.choice(links[-2:])
            if link[side]:
                deliver(link, side)
        else:
            hellos = [sessions[0].resume(0), sessions[1].resume(0)]
            if rng.random() < 0.5 and links[-1][0]:  # the old link goes on between HELLO and READY
                deliver(links[-1], 0)
            links.append([[], []])
            sessions[0].attach(peer_epoch=2, peer_resume=hellos[1])
            sessions[1].attach(peer_epoch=1, peer_resume=hellos[0])

    for _ in range(300):
        step()
    attach(*sessions)
    links.append([[], []])
    for side in (0, 1):
        pump(side)
    for side in (0, 1):
        while links[-1][side]:
            deliver(links[-1], side)
    assert arrived[1] == offered[0] and arrived[0] == offered[1]


def test_a_resume_of_a_life_that_we_never_had_says_nothing():
    one, _ = pair()
    one.offer("stage", [b"x"])
    sent(one)
    one.attach(peer_epoch=2, peer_resume=Resume(known_epoch=99, received=1))
    assert len(sent(one)) == 1
