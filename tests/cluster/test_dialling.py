"""Races of attempts, some of which end at the same moment."""

from __future__ import annotations

import asyncio
import gc

from ppsmoke.cluster.dialling import first_of
from ppsmoke.cluster.link import DuplicateLink
from tests.lab.cluster import run

LOSERS = 40  # in which order those that have ended are looked at is chance


def test_attempts_that_fail_as_another_succeeds_are_no_errors_that_nobody_looked_at():
    async def scenario():
        over = asyncio.get_running_loop().create_future()

        async def succeeds():
            return await over

        async def fails():
            await over
            raise DuplicateLink("another link is kept")

        race = asyncio.ensure_future(first_of([(0.0, attempt) for attempt in (succeeds, *[fails] * LOSERS)]))
        await asyncio.sleep(0.01)
        over.set_result("the link")
        assert await race == "the link"
        gc.collect()  # a task whose error nobody has seen says so when it is forgotten

    run(scenario())
