"""Links that others bring about, a relay or a hole: whoever asked waits here, whoever learns how it went says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ppsmoke.cluster.link import Link
from ppsmoke.errors import DeadlineExceeded, LinkError
from ppsmoke.waiting import Deadline


class AskedLinks:
    """By whom was asked and about whom: two node ids."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], asyncio.Future[Link]] = {}

    async def wait(self, asked: str, about: str, *, ask: Callable[[], None], within_s: float, silence: str) -> Link:
        """Ask, then wait for settle(). Raises LinkError: the one that it brings, or `silence` after within_s."""
        key = asked, about
        waiting = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
        ask()
        try:
            return await Deadline.after(within_s).wait(asyncio.shield(waiting), doing="")
        except DeadlineExceeded:
            raise LinkError(silence) from None
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]

    def settle(self, asked: str, about: str, outcome: Link | LinkError) -> None:
        """The first outcome counts; nobody may be waiting any more."""
        waiting = self._waiting.get((asked, about))
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, LinkError):
            waiting.set_exception(outcome)
            waiting.exception()  # whoever asked may have given up
        else:
            waiting.set_result(outcome)
