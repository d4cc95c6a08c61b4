"""After this process, or this machine, stood still: nobody is blamed for a silence that was ours, links are tried.

A stopped process (Ctrl-Z, a starved container) finds its timers late. A suspended machine does not: there the loop's
clock stands meanwhile (CLOCK_MONOTONIC), and only one that counts sleep tells (CLOCK_BOOTTIME). facts/network.md, 6.46.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ppsmoke.cluster.roster import Roster

PULSE_S = 1.0
NOTABLE_S = 5.0  # less than this is a busy machine
ANSWER_S = 6.0  # for a link to prove that it has outlived a sleep; with its peer as busy, and a lost packet or two
REMEMBERED_S = 60.0  # so long a loss may be told to be of the sleep's making

_log = logging.getLogger("ppsmoke.cluster")


class Waking:
    """Looks at both clocks once a second, from start() to close(). clock: microseconds, sleep included."""

    def __init__(self, roster: Roster, *, clock: Callable[[], int]) -> None:
        self._roster = roster
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._pulse: asyncio.TimerHandle | None = None
        self._looked_at = (0.0, 0)  # by the loop's clock, and by the one that counts sleep
        self._slept_s = 0.0  # when last
        self._woke_at = 0.0

    def start(self) -> None:
        self._looked_at = self._loop.time(), self._clock()
        self._pulse = self._loop.call_later(PULSE_S, self._look)

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()

    def stood_still(self) -> str:
        """ "this machine stood still for 40 s until 15 s ago", or "" if that is no matter now."""
        ago_s = self._loop.time() - self._woke_at
        if not self._slept_s or ago_s > REMEMBERED_S:
            return ""
        return f"this machine stood still for {self._slept_s:.0f} s until {ago_s:.0f} s ago"

    def _look(self) -> None:
        last, last_counting = self._looked_at
        self.start()
        now, counting = self._looked_at
        lag_s = now - last - PULSE_S
        slept_s = max(lag_s, (counting - last_counting) / 1e6 - PULSE_S)
        if slept_s >= NOTABLE_S:
            self._slept_s, self._woke_at = slept_s, now
            self._wake(last, max(0.0, lag_s))

    def _wake(self, since: float, lag_s: float) -> None:
        """since: the last look before the sleep; lag_s: by how much the loop's clock went on meanwhile."""
        _log.info("this machine stood still for %.0f s", self._slept_s)
        for peer in self._roster.peers.values():
            peer.stood_still(since, lag_s)
            if peer.link is not None:
                peer.link.prove(ANSWER_S)
