"""Names on whole nodes: they count only with the role in their owner's certificate, and its latest generation."""

from __future__ import annotations

import asyncio

import pytest

from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.events import LinkDown
from ppsmoke.errors import DeadlineExceeded, LinkError
from ppsmoke.waiting import Deadline
from tests.lab.cluster import (
    IMPATIENT,
    endpoint_of,
    lab,
    link_between,
    next_event,
    receive_all,
    run,
    until,
    within,
)


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
            await until(lambda: len(orchestrator._membership.lookup("pp-entry")) == 2, doing="the lie and the truth")
            assert await within(orchestrator.resolve("pp-entry")) == Address(stage_0.node_id, "stage")
            orchestrator.register("pp-exit", "trap", generation=9)  # the orchestrator may own no stage's name either
            stage_1.register("pp-exit", "stage")
            await until(lambda: len(stage_0._membership.lookup("pp-exit")) == 2, doing="the lie and the truth")
            assert await within(stage_0.resolve("pp-exit")) == Address(stage_1.node_id, "stage")
            assert [node.counters()["link.false-name"] for node in (orchestrator, stage_0)] == [1, 1]

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


def test_a_replacement_is_known_by_its_certificate_to_whom_nobody_has_told_of_it():
    """The replaced host was only out of reach, and is back: stages know each other by role, so they must drop it."""

    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            stage_1, old = await cluster.node("stage-1-of-2"), await cluster.node("stage-0-of-2")
            await within(old.dial(endpoint_of(stage_1)))
            new = await cluster.node("stage-0-of-2", generation=1)
            events = stage_1.subscribe()
            await within(new.dial(endpoint_of(stage_1)))
            down = await next_event(events, LinkDown)
            assert down.peer == old.node_id and "stage-0-of-2 is generation 1 now" in down.reason
            await until(lambda: old._roster.peer(stage_1.node_id).last_error, doing="the old one's next dial")
            assert [link.peer for link in stage_1.links()] == [new.node_id]

    run(scenario())
