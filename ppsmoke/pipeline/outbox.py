"""What a stage tells those outside the loop: sent in order by a task of its own, so that nobody waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ppsmoke.cluster.addresses import Address
from ppsmoke.errors import DeadlineExceeded, LinkLost, SmokeError
from ppsmoke.pipeline.messages import InferenceResponse, StageFailed, StageStatus, encode
from ppsmoke.waiting import Deadline

MAX_WAITING_STATUSES = 1000  # an orchestrator out of reach must not fill our memory; the oldest go first
PATIENCE_S = (
    120.0  # for an orchestrator that sleeps; a node that it has left alone for longer has ended (stage_node.py)
)
AGAIN_S = 0.5
Message = StageStatus | StageFailed | InferenceResponse


class Outbox:
    """Statuses, failures and answers on their way. `run` sends them; a newer loading status replaces one that still
    waits. Failures and answers are never dropped for want of room, and are tried again while nobody can be reached."""

    def __init__(self, send: Callable[[Address, bytes], Awaitable[None]], orchestrator: Address) -> None:
        self._send = send
        self._orchestrator = orchestrator
        self._waiting: deque[tuple[Address, Message]] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def post(self, message: Message, *, to: Address | None = None) -> None:
        """Takes the message, for the orchestrator unless it is to go elsewhere; returns at once."""
        newest = self._waiting[-1][1] if self._waiting else None
        if isinstance(newest, StageStatus) and newest.state == message_state(message) == "loading":
            self._waiting.pop()
        elif len(self._waiting) >= MAX_WAITING_STATUSES:
            self._drop_oldest_status()
        self._waiting.append((to or self._orchestrator, message))
        self._filled.set()
        self._empty.clear()

    async def run(self) -> None:
        """Send until cancelled. A status that cannot reach the orchestrator is dropped: there will be others."""
        while True:
            await self._filled.wait()
            while self._waiting:
                to, message = self._waiting.popleft()
                if isinstance(message, StageStatus):
                    with suppress(SmokeError):
                        await self._send(to, encode(message))
                else:
                    await self._insist(to, encode(message))
            self._filled.clear()
            self._empty.set()

    async def _insist(self, to: Address, payload: bytes) -> None:
        deadline = Deadline.after(PATIENCE_S)
        while deadline.remaining() > 0:
            try:
                return await self._send(to, payload)
            except LinkLost:
                await asyncio.sleep(AGAIN_S)
            except SmokeError:
                return  # nothing that time mends

    async def flush(self, within_s: float) -> None:
        """Wait, but no longer than this, until everything has been handed to the link; `run` must be running."""
        with suppress(DeadlineExceeded):
            await Deadline.after(within_s).wait(self._empty.wait(), doing="telling the orchestrator")

    def _drop_oldest_status(self) -> None:
        for index, (_, message) in enumerate(self._waiting):
            if isinstance(message, StageStatus):
                del self._waiting[index]
                return


def message_state(message: Message) -> str:
    """A status's state; "" for anything else."""
    return message.state if isinstance(message, StageStatus) else ""
