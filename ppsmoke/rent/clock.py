"""Time as the renting code sees it: an object that is passed in, so that tests need no waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from ppsmoke.errors import UsageError

LAB_CLOCK = "PPSMOKE_LAB_CLOCK"


class Clock(Protocol):
    """Two clocks and a way to wait: `now` is monotonic seconds, `wall` is seconds since 1970."""

    def now(self) -> float: ...

    def wall(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's own clocks. `speed` other than 1 is for a lab whose fake service runs that much faster: seconds
    shrink in every wait, and the wall clock runs ahead from `epoch` (seconds since 1970) on."""

    def __init__(self, *, speed: float = 1.0, epoch: float = 0.0) -> None:
        self._speed, self._epoch = speed, epoch

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RealClock:
        """PPSMOKE_LAB_CLOCK is `<speed>@<epoch>`; processes that share it agree on the time. Raises UsageError."""
        text = environ.get(LAB_CLOCK, "")
        if not text:
            return cls()
        try:
            speed, epoch = (float(part) for part in text.split("@"))
        except ValueError:
            raise UsageError(f"{LAB_CLOCK} is not <speed>@<epoch>") from None
        if not 0.1 <= speed <= 1000 or epoch <= 0:
            raise UsageError(f"{LAB_CLOCK} is out of range")
        return cls(speed=speed, epoch=epoch)

    def now(self) -> float:
        return time.monotonic() * self._speed

    def wall(self) -> float:
        return time.time() if self._speed == 1.0 else self._epoch + (time.time() - self._epoch) * self._speed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)
