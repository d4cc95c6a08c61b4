"""Whole nodes on loopback: gathering, guarding, what a watcher hears, a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ppsmoke.cluster.addresses import Address, Candidate, Endpoint
from ppsmoke.cluster.events import LinkUp, MemberChanged
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.swim_state import Config
from ppsmoke.errors import DeadlineExceeded, LinkLost
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.cluster import (
    IMPATIENT,
    RUN_KEY,
    endpoint_of,
    lab,
    next_event,
    receive_all,
    run,
    settled,
    until,
    within,
)
from tests.lab.node_child import node_child
from tests.lab.raw_peer import RawPeer

CLUSTER_KEY = derive(RUN_KEY, "cluster")


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


@pytest.mark.slow
def test_a_peer_that_nobody_has_looked_for_yet_is_not_lost_however_long_ago_it_was_heard_of():
    async def scenario():
        async with lab() as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-1")
            one._roster.peer(other.node_id)._down_since -= 1000  # a handshake that came to nothing, long ago
            sending = asyncio.ensure_future(one.send(other.address("box"), b"there"))
            await within(other.dial(endpoint_of(one)))
            await within(sending)
            assert await receive_all(other, "box", 1) == [b"there"]

    run(scenario())


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_death_counts_as_soon_as_all_is_silent_also_after_the_link_has_gone():
    quick = {"probe_period": 20_000, "timeout_min": 10_000, "timeout_max": 20_000, "doubt": 10_000}
    hasty = Config(udp=False, suspicion_min=50_000, **quick)

    async def scenario():
        # The link goes down after 0.3 s: a grace counted from there would end after 0.9 s.
        async with lab(timing=IMPATIENT, link_grace_s=0.6, swim=hasty) as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            with pytest.raises(LinkLost, match="stage-0-of-2: no byte for 1 s, and declared dead"):
                await within(node.guard([identity.node_id]))
            assert not node.links()
            await peer.close()

    run(scenario())


@pytest.mark.slow
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
