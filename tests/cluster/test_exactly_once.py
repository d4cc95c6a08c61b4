"""Messages between whole nodes: each once and in order, whatever links and lives do, and never without a bound."""

from __future__ import annotations

import asyncio
import os
import signal
import struct

import pytest

from ppsmoke.cluster import mailbox as mailbox_module
from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.events import LinkDown, LinkUp
from ppsmoke.cluster.frames import FrameFlags, FrameType, encode_frame
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, LinkLost
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline
from tests.lab.cluster import (
    IMPATIENT,
    RUN_KEY,
    endpoint_of,
    lab,
    link_between,
    next_event,
    one_link_each_way,
    receive_all,
    run,
    until,
    within,
)
from tests.lab.node_child import node_child
from tests.lab.raw_peer import RawPeer

CLUSTER_KEY = derive(RUN_KEY, "cluster")


@pytest.mark.parametrize("round_", range(5))
def test_when_both_dial_at_once_both_keep_the_same_link(round_):
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-2", generation=round_)
            dials = one.dial(endpoint_of(other, generation=round_)), other.dial(endpoint_of(one))
            await within(asyncio.gather(*dials))
            for number in range(20):
                await within(one.send(other.address("box"), b"%d" % number))
            assert await receive_all(other, "box", 20) == [b"%d" % number for number in range(20)]
            await until(lambda: one_link_each_way(one, other))
            await until(lambda: len(one._maker.links) == len(other._maker.links) == 1)

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("killer", ["dialler", "acceptor", "both"])
def test_links_killed_under_a_running_exchange_lose_and_repeat_nothing(killer):
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-2")
            await within(one.dial(endpoint_of(other)))
            sizes = [10, 4096, 70_000, 300_000]
            messages = [bytes([number % 256]) * sizes[number % 4] for number in range(120)]
            events = one.subscribe()

            async def speak(source: Node, target: Node) -> None:
                for number, message in enumerate(messages):
                    await source.send(target.address("box"), [b"%4d" % number, message])
                    if number % 10 == 0:
                        await asyncio.sleep(0.005)

            async def kill() -> None:
                for _ in range(6):
                    await until(lambda: one_link_each_way(one, other))
                    if killer != "acceptor":
                        link_between(one, other).abort()
                    if killer != "dialler" and (link := link_between(other, one)) is not None:
                        link.abort()
                    await next_event(events, LinkDown)

            spoken = asyncio.gather(speak(one, other), speak(other, one), kill())
            expected = [b"%4d" % number + message for number, message in enumerate(messages)]
            there, back = await asyncio.gather(
                receive_all(other, "box", len(messages)), receive_all(one, "box", len(messages))
            )
            await within(spoken)
            assert there == expected and back == expected
            assert not len(one.mailbox("box")) and not len(other.mailbox("box"))

    run(scenario())


def test_a_peer_in_a_new_life_is_told_apart_from_the_old_one():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            events = node.subscribe()
            first = await within(RawPeer.linked(node, identity, CLUSTER_KEY, epoch=5))
            assert await next_event(events, LinkUp) == LinkUp(identity.node_id, "stage-0-of-2", restarted=False)
            guard = asyncio.ensure_future(node.guard([identity.node_id]))
            await within(node.send(Address(identity.node_id, "box"), b"for the first life"))
            await within(first.expect(FrameType.DATA))
            await first.close()
            second = await within(RawPeer.linked(node, identity, CLUSTER_KEY, epoch=6))
            assert (await next_event(events, LinkUp)).restarted
            with pytest.raises(LinkLost, match="stage-0-of-2 has restarted"):
                await within(guard)
            await within(node.send(Address(identity.node_id, "box"), b"for the second"))
            data = await within(second.expect(FrameType.DATA))
            assert data.sequence == 1 and data.payload.endswith(b"boxfor the second")
            await second.close()

    run(scenario())


def test_the_last_words_of_an_earlier_life_are_not_taken_for_the_later_ones():
    """A process was killed and started again while the network still held what the first had written. Both count their
    chunks from 1."""

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            box = node.mailbox("box")
            identity = cluster.authority.mint("stage-0-of-2")
            earlier = await within(RawPeer.linked(node, identity, CLUSTER_KEY, epoch=5))
            later = await within(RawPeer.linked(node, identity, CLUSTER_KEY, epoch=6))
            peer = node._roster.peer(identity.node_id)
            await until(lambda: peer.epoch == 6, doing="the later life's link")
            await within(node.send(Address(identity.node_id, "box"), b"for the later life"))
            earlier.write(whole_message(1, b"of the earlier life") + encode_frame(FrameType.ACK, sequence=1))
            earlier.write(encode_frame(FrameType.PING, sequence=7))
            while (await within(earlier.expect(FrameType.PONG))).sequence != 7:
                pass
            assert not peer.session.idle and len(box) == 0
            later.write(whole_message(1, b"of the later life"))
            assert (await within(box.receive())).payload == b"of the later life"
            await earlier.close()
            await later.close()

    run(scenario())


def whole_message(sequence: int, payload: bytes) -> bytes:
    """To the mailbox "box", in one chunk."""
    head = struct.pack("!IB", len(payload), len(b"box")) + b"box"
    return encode_frame(
        FrameType.DATA, flags=FrameFlags.FIRST | FrameFlags.LAST, sequence=sequence, payload=head + payload
    )


@pytest.mark.parametrize(
    "later_epoch",
    [pytest.param(6, id="clock goes on", marks=pytest.mark.slow), pytest.param(4, id="clock was set back")],
)
def test_a_link_of_an_earlier_life_that_comes_up_late_is_refused(later_epoch):
    """Its READY was on the way while the process died, was started again, linked, and lost that link for a moment."""

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            for epoch in (5, later_epoch):
                raw = await within(RawPeer.linked(node, identity, CLUSTER_KEY, epoch=epoch))
                await raw.close()
                await until(lambda: not node.links(), doing="the end of its link")
            late = await within(RawPeer.dial(node, identity, CLUSTER_KEY))
            late.say_hello(identity.node_id, epoch=5)
            late.write(encode_frame(FrameType.READY))
            bye = await within(late.expect(FrameType.BYE))
            assert b"a later process with this node's key" in bye.payload
            assert node._roster.peer(identity.node_id).epoch == later_epoch
            await late.close()

    run(scenario())


def test_an_older_life_cannot_take_the_link_of_a_later_one():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            later = await within(RawPeer.linked(node, identity, CLUSTER_KEY, epoch=6))
            earlier = await within(RawPeer.dial(node, identity, CLUSTER_KEY))
            earlier.say_hello(identity.node_id, epoch=5)
            earlier.write(bytes.fromhex("00000000020000000000000000000000"))  # READY
            bye = await within(earlier.expect(FrameType.BYE))
            assert b"a later process with this node's key" in bye.payload
            assert node.links()
            await earlier.close()
            await later.close()

    run(scenario())


def test_a_peer_that_acknowledges_nothing_stops_the_sender_at_the_window():
    async def scenario():
        async with lab(window_bytes=100_000) as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            sent = 0
            with pytest.raises(DeadlineExceeded):
                while True:
                    sending = node.send(Address(identity.node_id, "box"), bytes(10_000))
                    await Deadline.after(0.2).wait(sending, doing="sending beyond the window")
                    sent += 1
            assert sent == 10
            assert node._roster.peers[identity.node_id].session.unacked_bytes < 110_000
            await peer.close()

    run(scenario())


@pytest.mark.slow
def test_a_full_mailbox_stops_its_senders_until_it_is_read(monkeypatch):
    monkeypatch.setattr(mailbox_module, "MAILBOX_BYTES", 200_000)

    async def scenario():
        async with lab(window_bytes=100_000) as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-2")
            await within(one.dial(endpoint_of(other)))
            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for number in range(100):
                    await one.send(other.address("box"), b"%2d" % number + bytes(10_000))
                    sent += 1

            sending = asyncio.ensure_future(send_all())
            await until(lambda: other.mailbox("box").full)
            with pytest.raises(DeadlineExceeded):
                await Deadline.after(0.3).wait(until(lambda: sent > 45), doing="more than both bounds")
            assert [payload[:2] for payload in await receive_all(other, "box", 100)] == [b"%2d" % n for n in range(100)]
            await within(sending)

    run(scenario())


def test_a_cancelled_send_leaves_no_half_message_behind():
    async def scenario():
        async with lab(window_bytes=100_000) as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-2")
            await within(one.dial(endpoint_of(other)))
            await within(one.send(other.address("box"), bytes(1_000_000)))
            sending = asyncio.ensure_future(one.send(other.address("box"), b"cancelled"))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait({sending})
            await within(one.send(other.address("box"), b"whole"))
            received = await receive_all(other, "box", 2)
            assert [len(payload) for payload in received] == [1_000_000, 5]

    run(scenario())


def test_a_send_to_a_node_that_nobody_can_reach_is_lost_after_the_grace():
    async def scenario():
        async with lab(link_grace_s=0.2) as cluster:
            node = await cluster.node("orchestrator")
            with pytest.raises(LinkLost, match="0123456789abcdef: no link for 0 s .no link yet."):
                await within(node.send(Address("0123456789abcdef", "box"), b"lost"))

    run(scenario())


@pytest.mark.slow
def test_last_messages_arrive_although_the_sender_ends_at_once():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            async with cluster.listening("stage-0-of-2") as stage:
                await within(node.dial(endpoint_of(stage)))
                await within(stage.send(node.address("box"), bytes(3_000_000)))
                await within(stage.send(node.address("box"), b"StageFailed"))
            assert [len(payload) for payload in await receive_all(node, "box", 2)] == [3_000_000, 11]

    run(scenario())


@pytest.mark.slow
def test_a_frozen_process_that_thaws_goes_on_where_it_stopped():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            events = node.subscribe()
            with node_child("stage-0-of-2") as (child, endpoint):
                await within(node.dial(endpoint))
                os.kill(child.pid, signal.SIGSTOP)
                await within(node.send(Address(endpoint.node_id, "echo"), b"while frozen"))
                await next_event(events, LinkDown)
                os.kill(child.pid, signal.SIGCONT)
                assert await receive_all(node, "echoed", 1) == [b"while frozen"]

    run(scenario())
