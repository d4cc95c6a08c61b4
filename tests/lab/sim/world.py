"""Virtual time: what is due when, machines whose event loops run when something is due there, and a trace to compare.

Nothing here reads a real clock, real chance or the order of a hash: the same seed gives the same trace, byte by byte.
"""

from __future__ import annotations

import heapq
import random
import zlib
from asyncio import events
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tests.lab.sim.loop import MachineLoop

MAX_TURNS_AT_ONE_MOMENT = 20_000  # of all loops; more means that something spins
MAX_STEPS = 400_000  # of a run; a usual one has 20,000


class Stuck(Exception):
    """Time cannot go on: nothing is due any more, or what is due never ends."""


class World:
    turning: ClassVar[MachineLoop | None] = None  # asyncio knows one running loop: so do all worlds together

    def __init__(self, seed: int, *, tell: Callable[[str], None] | None = None) -> None:
        """tell: for a person who replays one seed, every line of the trace."""
        self.seed = seed
        self.now = 0.0
        self.trace = 0  # a running checksum of everything that happened
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.awake: deque[MachineLoop] = deque()
        self._tell = tell
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def random(self, *key: object) -> random.Random:
        """A generator for this purpose alone: drawing from one leaves the others as they were."""
        return random.Random(f"{self.seed}/{key}")

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._order, action, arguments))

    def due(self, action: Callable[..., None]) -> list[tuple[float, tuple[Any, ...]]]:
        """When that action is to be called, and with what."""
        return [(when, arguments) for when, _, one, arguments in sorted(self._queue) if one == action]

    def note(self, kind: str, who: str, detail: str = "") -> None:
        """One line of the trace."""
        line = f"{self.now:.6f} {kind} {who} {detail}"
        self.trace = zlib.crc32(line.encode(), self.trace)
        if self._tell is not None:
            self._tell(line)

    def note_bytes(self, label: str, data: bytes) -> None:
        """The same for what arrives, which is most of it."""
        self.trace = zlib.crc32(data, (self.trace + round(self.now * 1e6)) & 0xFFFFFFFF)
        if self._tell is not None:
            self._tell(f"{self.now:.6f} {label} ({len(data)} bytes)")

    def run(self, until_s: float) -> None:
        """Up to that moment. Raises Stuck."""
        try:
            self._run(until_s)
        finally:
            World.turning = None
            events._set_running_loop(None)

    def _run(self, until_s: float) -> None:
        queue, awake, pop = self._queue, self.awake, heapq.heappop
        while True:
            turns = 0
            while awake:
                awake.popleft().turn()
                turns += 1
                if turns > MAX_TURNS_AT_ONE_MOMENT:
                    raise Stuck(f"at {self.now:.6f} s the loops turn for ever")
            if not queue:
                raise Stuck(f"at {self.now:.6f} s nothing is due any more")
            if queue[0][0] > until_s:
                self.now = until_s
                return
            when, _, action, arguments = pop(queue)
            if when > self.now:
                self.now = when
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise Stuck(f"at {self.now:.6f} s {self.steps:,} things have happened")
            action(*arguments)
