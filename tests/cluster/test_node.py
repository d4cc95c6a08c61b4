"""Whole nodes on loopback: messages over links that die, names, gathering, guarding, a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ppsmoke.cluster import mailbox as mailbox_module
from ppsmoke.cluster.addresses import Address, Candidate, Endpoint
from ppsmoke.cluster.events import LinkDown, LinkUp, MemberChanged
from ppsmoke.cluster.frames import FrameType
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.cluster.swim_state import Config
from ppsmoke.errors import DeadlineExceeded, LinkError, LinkLost
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.cluster import IMPATIENT, RUN_KEY, endpoint_of, lab, next_event, run, settled, until, within
from tests.lab.node_child import node_child
from tests.lab.raw_peer import RawPeer

CLUSTER_KEY = derive(RUN_KEY, "cluster")


def link_between(one: Node, other: Node):
    """The link that `one` uses towards `other` now."""
    peer = one._roster.peers.get(other.node_id)
    return peer.link if peer is not None else None


def one_link_each_way(one: Node, other: Node) -> bool:
    mine, theirs = link_between(one, other), link_between(other, one)
    return mine is not None and theirs is not None and mine.id == theirs.id


async def receive_all(node: Node, mailbox: str, count: int) -> list[bytes]:
    box = node.mailbox(mailbox)
    return [(await within(box.receive(), f"message {number}")).payload for number in range(count)]


@pytest.mark.parametrize("udp", [None, ("127.0.0.1", 0)], ids=["links alone", "with UDP"])
def test_three_nodes_gather_and_see_each_other(udp):
    async def scenario():
        async with lab(udp=udp) as cluster:
            nodes = await cluster.trio()
            orchestrator = nodes[0]
            assert [link.role for link in orchestrator.links()] == ["stage-0-of-2", "stage-1-of-2"]
            assert (orchestrator.udp_port is None) == (udp is None)
            for node in nodes:
                await until(lambda node=node: {m.node_id for m in node.members()} == {n.node_id for n in nodes})
                assert {member.state for member in node.members()} == {"alive"}

    run(scenario())


def test_a_delivery_names_its_sender_and_the_role_in_its_certificate():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, _ = await cluster.trio()
            await within(stage_0.send(orchestrator.address("answers"), [b"in ", b"pieces"]))
            delivery = await within(orchestrator.mailbox("answers").receive())
            assert (delivery.sender, delivery.sender_role) == (stage_0.node_id, "stage-0-of-2")
            assert delivery.payload == b"in pieces"

    run(scenario())


def test_a_node_can_write_to_itself():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            await within(node.send(node.address("box"), b"note"))
            assert (await within(node.mailbox("box").receive())).payload == b"note"

    run(scenario())


def test_a_name_resolves_to_a_node_that_nobody_told_us_the_address_of():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, stage_1 = await cluster.trio()
            stage_1.register("pp-stage-1", "stage")
            assert link_between(stage_0, stage_1) is None
            address = await within(stage_0.resolve("pp-stage-1"))
            assert address == Address(stage_1.node_id, "stage")
            await within(stage_0.send(address, b"activation"))
            assert await receive_all(stage_1, "stage", 1) == [b"activation"]
            assert await within(stage_1.resolve("pp-stage-1")) == address  # its own name, without a link

    run(scenario())


def test_a_lying_claimant_is_skipped_however_new_its_claim():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, stage_1 = await cluster.trio()
            stage_1.register("pp-entry", "trap", generation=9)
            stage_0.register("pp-entry", "stage")
            assert await within(orchestrator.resolve("pp-entry")) == Address(stage_0.node_id, "stage")
            orchestrator.register("pp-exit", "trap", generation=9)  # the orchestrator may own no stage's name either
            stage_1.register("pp-exit", "stage")
            assert await within(stage_0.resolve("pp-exit")) == Address(stage_1.node_id, "stage")

    run(scenario())


def test_a_claim_to_a_later_assignment_than_the_certificates_does_not_count():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, _ = await cluster.trio()
            stage_0.register("pp-entry", "stage", generation=1)
            with pytest.raises(DeadlineExceeded):
                await Deadline.after(0.3).wait(orchestrator.resolve("pp-entry"), doing="a lie")

    run(scenario())


def test_a_replacement_supersedes_the_node_it_replaces():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            orchestrator, old, _ = await cluster.trio()
            old.register("pp-entry", "stage")
            assert (await within(orchestrator.resolve("pp-entry"))).node_id == old.node_id
            new = await cluster.node("stage-0-of-2", generation=1)
            events = orchestrator.subscribe()
            await within(orchestrator.dial(endpoint_of(new, generation=1)))
            down = await next_event(events, LinkDown)
            assert down.peer == old.node_id and "stage-0-of-2 is generation 1 now" in down.reason
            new.register("pp-entry", "stage", generation=1)
            assert (await within(orchestrator.resolve("pp-entry"))).node_id == new.node_id
            dialling = asyncio.ensure_future(old.dial(endpoint_of(orchestrator)))
            with pytest.raises(DeadlineExceeded):  # nor does the old one get in by dialling
                await Deadline.after(0.3).wait(until(lambda: link_between(orchestrator, old)), doing="an outdated dial")
            dialling.cancel()
            await asyncio.wait({dialling})
            with pytest.raises(LinkError, match="has been replaced"):
                await within(orchestrator.dial(endpoint_of(old)))

    run(scenario())


def test_a_node_that_has_ended_keeps_no_link_for_anybody():
    async def scenario():
        async with lab() as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-2")
            where = endpoint_of(other)
        late = asyncio.ensure_future(one.dial(where))
        await settled()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("keep ")]
        await cancel_and_reap(late)

    run(scenario())


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


def test_guarding_tells_of_a_peer_that_left():
    async def scenario():
        async with lab(link_grace_s=0.2) as cluster:
            node = await cluster.node("orchestrator")
            async with cluster.listening("stage-0-of-2") as stage:
                await within(node.dial(endpoint_of(stage)))
                guard = asyncio.ensure_future(node.guard([stage.node_id]))
            with pytest.raises(LinkLost, match="stage-0-of-2 has left: its node has ended"):
                await within(guard)

    run(scenario())


def test_swims_death_counts_only_when_the_link_is_as_silent():
    hasty = Config(udp=False, probe_period=20_000, timeout_min=10_000, timeout_max=20_000, suspicion_min=50_000)

    async def scenario():
        # Pings are so rare that the link itself finds nothing wrong.
        async with lab(link_grace_s=0.4, swim=hasty) as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            with pytest.raises(LinkLost, match="stage-0-of-2: no byte for [0-9]+ s, and declared dead"):
                await within(node.guard([identity.node_id]))
            assert node.links()
            await peer.close()

    run(scenario())


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "Connection refused"), (signal.SIGSTOP, "no handshake|no byte")]
)
def test_guarding_tells_of_a_process_that_was_killed_or_frozen(number, cause):
    async def scenario():
        async with lab(timing=IMPATIENT, link_grace_s=0.5) as cluster:
            node = await cluster.node("orchestrator")
            with node_child("stage-0-of-2") as (child, endpoint):
                await within(node.dial(endpoint))
                await within(node.send(Address(endpoint.node_id, "echo"), b"there"))
                assert await receive_all(node, "echoed", 1) == [b"there"]
                guard = asyncio.ensure_future(node.guard([endpoint.node_id]))
                os.kill(child.pid, number)
                with pytest.raises(LinkLost, match=f"stage-0-of-2: no link for [01] s .*({cause})"):
                    await within(guard)

    run(scenario())


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


def test_watchers_hear_of_members_and_links():
    async def scenario():
        async with lab(udp=("127.0.0.1", 0)) as cluster:
            node = await cluster.node("orchestrator")
            events = node.subscribe()
            stage = await cluster.node("stage-0-of-2")
            await within(node.dial(endpoint_of(stage)))
            assert await next_event(events, LinkUp) == LinkUp(stage.node_id, "stage-0-of-2", restarted=False)
            assert await next_event(events, MemberChanged) == MemberChanged(stage.node_id, "stage-0-of-2", "alive")

    run(scenario())


def test_a_seed_address_is_enough_to_dial():
    async def scenario():
        async with lab() as cluster:
            mapped = Candidate("mapped", "127.0.0.1", 40001)
            node = await cluster.node("orchestrator", advertise=[mapped])
            node_id, _, where = node.seed_addr.partition("@")
            assert where == f"127.0.0.1:{node.tcp_port},127.0.0.1:40001"
            stage = await cluster.node("stage-0-of-2")
            host, port = where.split(",")[0].split(":")
            await within(stage.dial(Endpoint("orchestrator", 0, node_id, host, int(port), None)))
            assert [link.role for link in stage.links()] == ["orchestrator"]

    run(scenario())


def test_a_node_that_ends_leaves_no_socket_and_no_task():
    def open_files() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    async def scenario():
        before = open_files()
        for _ in range(2):
            async with lab(udp=("127.0.0.1", 0)) as cluster:
                orchestrator, stage_0, _ = await cluster.trio()
                await within(orchestrator.send(stage_0.address("box"), bytes(1_000_000)))
                dialling = asyncio.ensure_future(orchestrator.resolve("pp-nobody"))
                await asyncio.sleep(0)
                dialling.cancel()
        await until(lambda: open_files() == before, doing="the last sockets to close")

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    run(scenario())


def test_an_error_in_the_block_passes_through_a_clean_end():
    async def scenario():
        with pytest.raises(ZeroDivisionError):
            async with lab() as cluster:
                await cluster.trio()
                raise ZeroDivisionError

    run(scenario())


def test_a_cancelled_node_still_ends_cleanly():
    async def scenario():
        started = asyncio.Event()

        async def body() -> None:
            async with lab() as cluster:
                await cluster.trio()
                started.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(body())
        await within(started.wait())
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    run(scenario())


def test_an_impostors_authority_is_another_cluster():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            other = RunAuthority(b"o" * 32).mint("stage-0-of-2")
            endpoint = Endpoint("stage-0-of-2", 0, other.node_id, "127.0.0.1", node.tcp_port, None)
            with pytest.raises(DeadlineExceeded):  # it reaches itself, which is nobody
                await Deadline.after(0.2).wait(node.dial(endpoint), doing="a dial to ourselves")
            assert not node.links()

    run(scenario())
