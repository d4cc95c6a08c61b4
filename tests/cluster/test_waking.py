"""After a sleep of this process or this machine: links prove themselves, no silence of ours counts against others."""

from __future__ import annotations

import asyncio
import time

import pytest

from ppsmoke.cluster import waking
from ppsmoke.cluster.events import LinkDown
from ppsmoke.keys import derive
from tests.lab.cluster import IMPATIENT, RUN_KEY, endpoint_of, lab, next_event, run, until, within
from tests.lab.node_child import node_child
from tests.lab.raw_peer import RawPeer

CLUSTER_KEY = derive(RUN_KEY, "cluster")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(waking, "PULSE_S", 0.05)
    monkeypatch.setattr(waking, "NOTABLE_S", 0.3)
    monkeypatch.setattr(waking, "ANSWER_S", 0.2)


def let_the_clock_jump(node, seconds: float) -> None:
    """As on a suspended machine: the clock that counts sleep has gone on, the loop's has not."""
    real = node._waking._clock
    node._waking._clock = lambda: real() + round(seconds * 1e6)


def test_a_link_that_did_not_outlive_a_sleep_is_given_up_soon():
    async def scenario():
        async with lab() as cluster:  # a link's own patience is 15 s
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            events = node.subscribe()
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))  # it answers nothing
            let_the_clock_jump(node, 40.0)
            down = await next_event(events, LinkDown)
            assert down.reason == "stage-0-of-2 did not answer within 0.2 s after this machine stood still"
            assert node.stood_still().startswith("this machine stood still for 40 s until ")
            await peer.close()

    run(scenario())


@pytest.mark.slow
def test_a_link_that_outlived_a_sleep_stays():
    async def scenario():
        async with lab() as cluster:
            node, stage = [await cluster.node(role) for role in ("orchestrator", "stage-0-of-2")]
            await within(node.dial(endpoint_of(stage)))
            link = node._roster.peers[stage.node_id].link
            let_the_clock_jump(node, 40.0)
            await until(node.stood_still)
            await until(lambda: link._ponged == link._pings)
            await asyncio.sleep(2 * waking.ANSWER_S)  # its end would have come by now
            assert node._roster.peers[stage.node_id].link is link and link.state == "up"

    run(scenario())


@pytest.mark.slow
def test_a_freeze_of_ours_is_not_counted_as_a_time_without_a_link():
    async def scenario():
        async with lab(timing=IMPATIENT, link_grace_s=0.6) as cluster:
            node = await cluster.node("orchestrator")
            with node_child("stage-0-of-2") as (child, endpoint):
                await within(node.dial(endpoint))
                peer = node._roster.peers[endpoint.node_id]
                child.kill()
                await until(lambda: peer.link is None)
                await asyncio.sleep(2 * waking.PULSE_S)
                left_s = peer.lost_in_s()
                time.sleep(1.0)  # the loop stands still, as in a stopped process
                await until(node.stood_still)
                assert left_s - 0.4 < peer.lost_in_s() <= left_s
                now = asyncio.get_running_loop().time()
                peer.stood_still(now - 5.0, 4.0)  # what went down after the sleep had begun is not put off again
                assert left_s - 0.5 < peer.lost_in_s() <= left_s

    run(scenario())


def test_without_a_sleep_there_is_nothing_to_tell():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            await asyncio.sleep(3 * waking.PULSE_S)
            assert node.stood_still() == ""

    run(scenario())
