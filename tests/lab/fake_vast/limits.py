"""Minimum spacing between calls, by route and identity. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

# Seconds between two calls: the thresholds of the service's OpenAPI. Search: 10 a minute.
DOCUMENTED_S: Mapping[str, float] = {
    "create": 4.5, "show": 2.0, "list": 1.0, "destroy": 3.0, "manage": 1.0, "logs": 1.0, "execute": 1.5,
}  # fmt: skip
SEARCHES_PER_MINUTE = 10


class Limiter:
    """Judges each call; keeps count of those that came too early, whether or not they are refused."""

    def __init__(self, spacing_s: Mapping[str, float] = DOCUMENTED_S) -> None:
        self._spacing_s = spacing_s
        self._last: dict[tuple[str, str], float] = {}
        self._searches: dict[str, deque[float]] = defaultdict(deque)
        self.violations: dict[str, int] = defaultdict(int)

    def too_early(self, route: str, identity: str, now: float) -> float | None:
        """The threshold in seconds that this call breaks, or None; a call that passes is remembered."""
        if route == "search":
            return self._too_many_searches(identity, now)
        spacing_s = self._spacing_s.get(route, 0.0)
        last = self._last.get((route, identity))
        if last is not None and now - last < spacing_s - 1e-3:
            self.violations[route] += 1
            return spacing_s
        self._last[route, identity] = now
        return None

    def _too_many_searches(self, identity: str, now: float) -> float | None:
        recent = self._searches[identity]
        while recent and now - recent[0] >= 60.0:
            recent.popleft()
        if len(recent) >= SEARCHES_PER_MINUTE:
            self.violations["search"] += 1
            return 60.0 / SEARCHES_PER_MINUTE
        recent.append(now)
        return None
