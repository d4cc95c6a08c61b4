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
            _wake(future)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until the next notify, or until timeout_s have passed; which of the two is not told."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting[future] = None
        timer = loop.call_later(timeout_s, _wake, future) if timeout_s is not None else None
        try:
            await future
        finally:
            self._waiting.pop(future, None)
            if timer is not None:
                timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
