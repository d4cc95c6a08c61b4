"""Paths that change under a running exchange: better ones, lost ones; nothing is lost and nothing comes twice."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest

from ppsmoke.cluster import paths
from ppsmoke.cluster.addresses import Address, Candidate
from ppsmoke.cluster.node import Node
from ppsmoke.errors import LinkLost
from tests.lab.cluster import IMPATIENT, endpoint_of, lab, run, until, within
from tests.lab.hidden import advertise, dialled_stages, hidden, hidden_stages, info, until_path
from tests.lab.node_child import node_child

SIZES = (10, 4096, 70_000, 300_000)


class Stream:
    """Messages from one node to another until told to stop, and their digest at both ends."""

    def __init__(self, source: Node, target: Node, seed: int) -> None:
        self._source, self._target = source, target
        self._rng = random.Random(seed)
        self.sent = self.received = 0
        self._told, self._heard = hashlib.sha256(), hashlib.sha256()
        self.stopping = False

    async def speak(self) -> None:
        while not self.stopping:
            message = self._rng.randbytes(self._rng.choice(SIZES))
            self._told.update(message)
            await self._source.send(self._target.address("stream"), [b"%8d" % self.sent, message])
            self.sent += 1
            await asyncio.sleep(0.002)
        await self._source.send(self._target.address("stream"), b"end")

    async def listen(self) -> None:
        while (payload := (await self._target.mailbox("stream").receive()).payload) != b"end":
            assert payload[:8] == b"%8d" % self.received  # none is missing, none comes again
            self._heard.update(payload[8:])
            self.received += 1

    def check(self) -> None:
        assert self.received == self.sent and self._told.digest() == self._heard.digest()
        assert not len(self._target.mailbox("stream"))


async def while_streaming(one: Node, other: Node, script) -> tuple[Stream, Stream]:
    """Run the script while both talk to each other."""
    streams = Stream(one, other, 1), Stream(other, one, 2)
    talking = [asyncio.ensure_future(part()) for stream in streams for part in (stream.speak, stream.listen)]
    try:
        await within(until(lambda: all(stream.received > 3 for stream in streams)))
        await script()
        before = [stream.received for stream in streams]
        await until(lambda: all(s.received > n + 3 for s, n in zip(streams, before, strict=True)))
        for stream in streams:
            stream.stopping = True
        await within(asyncio.gather(*talking), "the streams' end")
    finally:
        for task in talking:
            task.cancel()
    for stream in streams:
        stream.check()
    return streams


@pytest.mark.parametrize("late", [0, 1])
def test_a_relayed_link_becomes_direct_under_a_running_exchange(late, monkeypatch):
    monkeypatch.setattr(paths, "ROUNDS_S", tuple(0.2 * number for number in range(1, 50)))

    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            orchestrator, *stages = await dialled_stages(cluster)  # whom the relay dials do not punch

            async def open_up() -> None:
                assert info(*stages).path == "relayed"
                where = Candidate("mapped", "127.0.0.1", stages[late].tcp_port)
                advertise(stages[late], [where])
                await until_path(*stages, "direct")

            await while_streaming(*stages, open_up)
            assert info(*stages).reason == "was relayed" and info(*stages).via == ""
            await until(lambda: not orchestrator.relayed(), doing="the end of the legs")

    run(scenario())


def test_a_direct_link_that_dies_falls_back_to_the_relay():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            orchestrator, *stages = await hidden_stages(cluster)
            await within(stages[0].dial(endpoint_of(stages[1])))

            async def shut() -> None:
                stages[0]._roster.peers[stages[1].node_id].endpoint = None  # nobody knows any longer where it listens
                for node, other in (stages, stages[::-1]):
                    node._roster.peers[other.node_id].link.abort()
                await until_path(*stages, "relayed")

            await while_streaming(*stages, shut)
            assert info(*stages).reason.startswith("after: ")

    run(scenario())


def test_when_the_relay_breaks_the_legs_off_new_ones_are_had():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            orchestrator, *stages = await hidden_stages(cluster)

            async def break_off() -> None:
                relay = orchestrator._reaching.relay
                before = relay.counts["spliced"]
                for pair in list(relay._pairs.values()):
                    for leg in pair.legs.values():
                        leg.result().socket.shutdown(2)
                await until(lambda: relay.counts["spliced"] > before)

            await while_streaming(*stages, break_off)

    run(scenario())


@pytest.mark.slow
def test_a_relay_that_is_killed_while_relaying_is_replaced_by_another():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            stages = [await hidden(cluster, f"stage-{index}-of-2") for index in (0, 1)]
            with node_child("orchestrator") as (child, endpoint):
                for stage in stages:
                    await within(stage.dial(endpoint))
                await within(stages[0].send(stages[1].address("first"), b"over the child"))
                assert info(*stages).via == "orchestrator"
                other = await cluster.node("stage-2-of-3")
                for stage in stages:
                    await within(stage.dial(endpoint_of(other)))

                async def kill() -> None:
                    child.kill()
                    await until(lambda: (link := info(*stages)) is not None and link.via == "stage-2-of-3")

                await while_streaming(*stages, kill)

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guards_the_relay_too", "words"),
    [
        pytest.param(False, "stage-1-of-2: no link for [01] s .over the relay orchestrator: ", id="named beside it"),
        pytest.param(True, "orchestrator: no link for [01] s", id="to blame itself"),
    ],
)
def test_without_another_relay_the_loss_names_the_one_that_is_gone(guards_the_relay_too, words):
    async def scenario():
        async with lab(timing=IMPATIENT, link_grace_s=0.5) as cluster:
            stages = [await hidden(cluster, f"stage-{index}-of-2") for index in (0, 1)]
            with node_child("orchestrator") as (child, endpoint):
                for stage in stages:
                    await within(stage.dial(endpoint))
                await within(stages[0].send(stages[1].address("first"), b"over the child"))
                child.kill()
                guarded = [stages[1].node_id, *([endpoint.node_id] if guards_the_relay_too else [])]
                with pytest.raises(LinkLost, match=words):
                    await within(stages[0].guard(guarded))

    run(scenario())


def test_a_relay_tells_both_ends_who_hung_up():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            orchestrator, stage_0, stage_1 = await hidden_stages(cluster)
            await within(stage_0.send(stage_1.address("first"), b"over the relay"))
            heard = []
            for stage in (stage_0, stage_1):
                before = stage._roster.on_signal
                stage._roster.on_signal = lambda peer, signal, before=before: (
                    heard.append(signal),
                    before(peer, signal),
                )
            stage_1._roster.peers[stage_0.node_id].link.abort()
            await until(lambda: len([one for one in heard if type(one).__name__ == "LegClosed"]) == 2)
            assert {one.reason for one in heard if type(one).__name__ == "LegClosed"} <= {
                "stage-1-of-2 hung up",
                "stage-1-of-2 was lost (Connection reset by peer)",
            }

    run(scenario())


def test_membership_travels_beside_the_relayed_bulk_and_not_in_it():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, stage_1 = await hidden_stages(cluster)
            await within(stage_0.send(Address(stage_1.node_id, "first"), b"over the relay"))
            await until(lambda: orchestrator._roster.counts["carried"] >= 2, doing="carried datagrams")
            member = next(one for one in stage_0.members() if one.node_id == stage_1.node_id)
            assert member.state == "alive"

    run(scenario())
