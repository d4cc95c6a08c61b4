"""What the three nodes of a cell have seen of each other, put together: the path of each pair, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from tests.lab.nat_lab.expected import NODES, PAIRS, Expected, Pair

UPGRADE_BUDGET_S = 32.0  # the last of three rounds of punching begins 20 s after the first, and may take 6
STEADY_S = 1.0  # the path that a pair ended on is still its path this much later
LOOK_EVERY_S = 0.1


class Sights:
    """At one moment. seen: by node, what its Watch says; ids: by node. Times count from when all three listened."""

    def __init__(self, seen: Mapping[str, dict[str, Any]], ids: Mapping[str, str]) -> None:
        self._seen, self._ids = seen, ids
        self.began = max(seen[name]["at"] for name in NODES)

    def path(self, pair: Pair) -> str:
        """The path that both ends name; "disputed" if they differ."""
        one, other = (self._history(*ends)[-1][1] for ends in (pair, pair[::-1]))
        return (one or "impossible") if one == other else "disputed"

    def path_s(self, pair: Pair) -> float | None:
        """Since when the later of the two ends has been on its last path."""
        if self.path(pair) in ("impossible", "disputed"):
            return None
        return max(self._history(*ends)[-1][0] for ends in (pair, pair[::-1])) - self.began

    def first_s(self, pair: Pair) -> float | None:
        """When the later of the pair's two first messages came."""
        times = [self._seen[at]["greeted"].get(self._ids[peer]) for at, peer in (pair, pair[::-1])]
        return None if None in times else max(times) - self.began

    def are_as(self, expected: Expected) -> bool:
        """Every pair is on its expected path and has exchanged a message."""
        return all(
            self.path(pair) == path and (path == "impossible" or self.first_s(pair) is not None)
            for pair, path in expected.paths.items()
        )

    def by_pair(self, what: Callable[[Pair], Any]) -> dict[Pair, Any]:
        return {pair: what(pair) for pair in PAIRS}

    def _history(self, at: str, peer: str) -> list[tuple[float, str]]:
        return self._seen[at]["paths"].get(self._ids[peer]) or [(self.began, "")]


def when_steady(look: Callable[[], Sights], expected: Expected, ended: Future[Any]) -> Sights:
    """What all have seen, once it is as expected and has stayed so, and `ended` is done; or when time is up."""
    steady_since: float | None = None
    while True:
        sights, now = look(), time.monotonic()
        if not (ended.done() and sights.are_as(expected)):
            steady_since = None
        elif now - (steady_since := steady_since or now) >= STEADY_S:
            return sights
        if now - sights.began > UPGRADE_BUDGET_S:
            return sights
        time.sleep(LOOK_EVERY_S)
