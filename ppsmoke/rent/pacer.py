"""One pacer for all calls: the API answers 429 to whoever calls a route again too soon, DELETE included."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from enum import Enum

from ppsmoke.rent.clock import Clock


class Route(Enum):
    """A kind of call, as the API limits them: each has its own minimum interval."""

    SEARCH = "search"
    CREATE = "create"
    SHOW = "show"
    LIST = "list"
    DESTROY = "destroy"
    LOGS = "logs"
    USER = "user"
    RESULT = "result"  # a log file on another host, which has no known limit


# Seconds between two arrivals that the service asks for (facts, section 7); where nothing is documented, 0.
DOCUMENTED_S: Mapping[Route, float] = {
    Route.SEARCH: 6.0,  # ten a minute
    Route.CREATE: 4.5,
    Route.SHOW: 2.0,
    Route.LIST: 1.0,
    Route.DESTROY: 3.0,
    Route.LOGS: 1.0,
}
# Seconds between two departures: with a margin, since two requests can arrive closer together than they left.
SPACING_S: Mapping[Route, float] = {
    Route.SEARCH: 6.5,
    Route.CREATE: 5.0,
    Route.SHOW: 2.4,
    Route.LIST: 1.4,
    Route.DESTROY: 3.5,
    Route.LOGS: 1.4,
    Route.USER: 1.4,
    Route.RESULT: 0.5,
}
ANY_ROUTE_SPACING_S = 0.1  # between any two calls: a burst over all routes is still a burst
BACKOFF_FIRST_S, BACKOFF_MOST_S = 2.0, 60.0  # facts, section 7
PENALTY_S: Mapping[Route, float] = {Route.CREATE: 12.0}  # documented; a refused create waits at least this long


class Pacer:
    """Gives out turns, first come first served on each route."""

    def __init__(self, clock: Clock, spacing_s: Mapping[Route, float] = SPACING_S) -> None:
        self._clock = clock
        self._spacing_s = spacing_s
        self._free_at = {route: float("-inf") for route in Route}
        self._any_free_at = float("-inf")
        self._locks = {route: asyncio.Lock() for route in Route}

    async def turn(self, route: Route, *, until: float = float("inf")) -> bool:
        """Return when a call on this route may leave; False where that would be after `until`, of the pacer's clock.
        Cancelled while waiting, or too late: no turn was used up."""
        async with self._locks[route]:
            while (wait := max(self._free_at[route], self._any_free_at) - self._clock.now()) > 0:
                if self._clock.now() + wait > until:
                    return False
                await self._clock.sleep(wait)
            self._free_at[route] = self._clock.now() + self._spacing_s[route]
            self._any_free_at = self._clock.now() + min(ANY_ROUTE_SPACING_S, self._spacing_s[route])
            return True

    def answered(self, route: Route) -> None:
        """An answer has come, so its request had arrived by now, perhaps long after it left: the next one leaves late
        enough to be no less than DOCUMENTED_S behind it, however slow the way was."""
        self._free_at[route] = max(self._free_at[route], self._clock.now() + DOCUMENTED_S.get(route, 0.0))

    def hold(self, route: Route, seconds: float) -> None:
        """Nobody's call leaves on this route for so long: the answer to a 429, which is about all of our calls."""
        self._free_at[route] = max(self._free_at[route], self._clock.now() + seconds)


def backoff_s(attempt: int, *, rng: random.Random, route: Route, asked_for: float | None = None) -> float:
    """How long to wait after failure number `attempt` (from 1): 2, 4, 8 ... 60 s, jittered by a fifth either way, and
    never less than what the service asked for or is known to punish with."""
    plain = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** (attempt - 1)) * rng.uniform(0.8, 1.2)
    return max(plain, PENALTY_S.get(route, 0.0) if asked_for is None else min(asked_for, BACKOFF_MOST_S))
