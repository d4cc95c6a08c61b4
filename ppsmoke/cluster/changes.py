"""Something changed, look again: a condition for one event loop, without a lock."""

from __future__ import annotations

import asyncio


class Signal:
    """Whoever waits is woken by the next notify, the first first; what changed is for the woken to see."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until the next notify, or until timeout_s have passed; which of the two is not told."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await asyncio.wait({future}, timeout=timeout_s)
        finally:
            self._waiting.pop(future, None)
