"""Links over a relay: real nodes and sockets on loopback, two of which nobody is told how to dial."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

import pytest

from ppsmoke.cluster.addresses import Address, Candidate
from ppsmoke.cluster.events import LinkDown
from ppsmoke.cluster.handshake import LinkKind, Preamble, preamble_key
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, LinkLost
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline
from tests.lab.cluster import IMPATIENT, RUN_KEY, endpoint_of, endpoints_of, lab, next_event, run, until, within
from tests.lab.hidden import advertise, hidden, hidden_stages, info, nowhere, until_path

CLUSTER_KEY = derive(RUN_KEY, "cluster")


async def exchange(one: Node, other: Node, count: int = 3) -> None:
    """Messages both ways, each once and in order."""
    for number in range(count):
        await within(one.send(other.address("box"), b"there %d" % number))
        await within(other.send(one.address("box"), b"back %d" % number))
    for node, text in ((one, b"back"), (other, b"there")):
        received = [(await within(node.mailbox("box").receive())).payload for _ in range(count)]
        assert received == [b"%s %d" % (text, number) for number in range(count)]


def test_two_nodes_that_nobody_can_dial_meet_over_the_one_that_both_dialled():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, stage_1 = await hidden_stages(cluster)
            stage_1.register("pp-stage-1", "box")
            assert await within(stage_0.resolve("pp-stage-1")) == Address(stage_1.node_id, "box")
            await exchange(stage_0, stage_1)
            link = info(stage_0, stage_1)
            assert (link.path, link.via, link.role) == ("relayed", "orchestrator", "stage-1-of-2")
            assert link.reason.startswith("the first that worked")
            (pair,) = orchestrator.relayed()
            assert {pair.one, pair.other} == {"stage-0-of-2", "stage-1-of-2"}
            assert pair.bytes_from_one > 1000 and pair.bytes_from_other > 1000

    run(scenario())


def test_a_relay_that_dialled_both_ends_dials_their_legs_too():
    async def scenario():
        async with lab() as cluster:
            orchestrator = await cluster.node("orchestrator")
            stages = [await hidden(cluster, f"stage-{index}-of-2") for index in (0, 1)]
            advertise(orchestrator)  # as from behind a NAT: only what it dials itself comes about
            await orchestrator.gather(endpoints_of(*stages), size=3, deadline=Deadline.after(20))
            await exchange(*stages)
            assert info(*stages).path == "relayed" and info(*stages).via == "orchestrator"

    run(scenario())


def test_a_home_that_cannot_be_dialled_gathers_a_stage_through_the_other_one():
    async def scenario():
        async with lab() as cluster:
            home = await hidden(cluster, "orchestrator")
            mapped = await cluster.node("stage-0-of-2")
            unmapped = await hidden(cluster, "stage-1-of-2")

            async def known():
                yield endpoint_of(mapped)
                yield nowhere(unmapped)

            gathering = asyncio.ensure_future(home.gather(known(), size=3, deadline=Deadline.after(20)))
            await until(lambda: info(home, mapped))
            await within(unmapped.dial(endpoint_of(mapped)))
            await within(gathering, "gathering over the relay")
            assert info(home, unmapped).path == "relayed" and info(home, unmapped).via == "stage-0-of-2"
            await exchange(home, unmapped)

    run(scenario())
