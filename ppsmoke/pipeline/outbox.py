"""What a stage tells the orchestrator outside the loop: sent in order by a task of its own, so that nobody waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ppsmoke.errors import DeadlineExceeded, SmokeError
from ppsmoke.pipeline.messages import StageFailed, StageStatus, encode
from ppsmoke.waiting import Deadline

MAX_WAITING_STATUSES = 1000  # an orchestrator out of reach must not fill our memory; the oldest go first


class Outbox:
    """Statuses and failures on their way to the orchestrator. `run` sends them; a newer loading status replaces one
    that still waits, failures are never dropped."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: deque[StageStatus | StageFailed] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def post(self, message: StageStatus | StageFailed) -> None:
        """Takes the message; returns at once."""
        newest = self._waiting[-1] if self._waiting else None
        if isinstance(newest, StageStatus) and newest.state == message_state(message) == "loading":
            self._waiting.pop()
        elif len(self._waiting) >= MAX_WAITING_STATUSES:
            self._drop_oldest_status()
        self._waiting.append(message)
        self._filled.set()
        self._empty.clear()

    async def run(self) -> None:
        """Send until cancelled. What cannot reach the orchestrator is dropped: there is nobody else to tell."""
        while True:
            await self._filled.wait()
            while self._waiting:
                with suppress(SmokeError):
                    await self._send(encode(self._waiting.popleft()))
            self._filled.clear()
            self._empty.set()

    async def flush(self, within_s: float) -> None:
        """Wait, but no longer than this, until everything has been handed to the link; `run` must be running."""
        with suppress(DeadlineExceeded):
            await Deadline.after(within_s).wait(self._empty.wait(), doing="telling the orchestrator")

    def _drop_oldest_status(self) -> None:
        for index, message in enumerate(self._waiting):
            if isinstance(message, StageStatus):
                del self._waiting[index]
                return


def message_state(message: StageStatus | StageFailed) -> str:
    """A status's state; a failure's is "failed"."""
    return message.state if isinstance(message, StageStatus) else "failed"
