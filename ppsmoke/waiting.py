"""The ways to wait, open to every room: a deadline with a name, cleaning up to the end, a task that its block owns.

asyncio.wait_for is not used: before 3.12 it loses a cancellation that arrives together with the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ppsmoke.errors import DeadlineExceeded

T = TypeVar("T")
CANCEL_GRACE_S = 5.0  # a cancelled task that is still alive after this is left behind; nothing of ours takes that long


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, and the budget in seconds and the phase that its error will name."""

    at: float
    budget_s: float
    phase: str = ""
    hint: str = "try a larger --budget"

    @classmethod
    def after(cls, seconds: float, *, phase: str = "") -> Deadline:
        return cls(_now() + seconds, seconds, phase)

    def capped(self, seconds: float, *, phase: str = "") -> Deadline:
        """The earlier of this deadline and `seconds` from now; the error names the one that ran out."""
        phase, at = phase or self.phase, _now() + seconds
        return Deadline(at, seconds, phase, hint="") if at < self.at else replace(self, phase=phase)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - _now())

    def expired(self, doing: str, *, hint: str = "", stage: int | None = None) -> DeadlineExceeded:
        """The error that says this deadline ran out while `doing`."""
        return DeadlineExceeded(
            f"{doing}: {self.budget_s:g} s spent", phase=self.phase, stage=stage, hint=hint or self.hint
        )

    async def wait(self, awaitable: Awaitable[T], *, doing: str, hint: str = "", stage: int | None = None) -> T:
        """The awaitable's result. Raises DeadlineExceeded, after cancelling it; a cancellation always passes on."""
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({task}, timeout=self.remaining())
        except asyncio.CancelledError:
            await cancel_and_reap(task)
            raise
        if not task.done():
            await cancel_and_reap(task)
            raise self.expired(doing, hint=hint, stage=stage)
        return task.result()


def _now() -> float:
    """The running loop's clock: the monotonic one, unless the loop is a simulated one."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


async def cancel_and_reap(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have ended; what they raise meanwhile is dropped."""
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=CANCEL_GRACE_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # marks it as seen


async def to_the_end(coroutine: Coroutine[Any, Any, T], *, doing: str, within_s: float) -> T:
    """Run a clean-up that no cancellation interrupts, on its own clock. A cancellation is passed on afterwards.

    Raises what the coroutine raises (that outranks the cancellation), or DeadlineExceeded after within_s seconds.
    """
    deadline = Deadline.after(within_s, phase="destroy")
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and deadline.remaining() > 0:
        try:
            await asyncio.wait({task}, timeout=deadline.remaining())
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        await cancel_and_reap(task)
        raise deadline.expired(doing, hint="see the log for what was still open")
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


@asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, Any], *, name: str) -> AsyncIterator[asyncio.Task[Any]]:
    """A task for this block alone: cancelled and awaited when the block ends. If it fails, the block is cancelled and
    the task's error raised in its place."""
    parent = asyncio.current_task()
    task = asyncio.ensure_future(coroutine)
    task.set_name(name)
    failed: list[BaseException] = []

    def on_done(done: asyncio.Task[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            failed.append(error)
            if parent is not None and inside:
                parent.cancel()

    inside = True
    task.add_done_callback(on_done)
    try:
        yield task
    except asyncio.CancelledError:
        if failed:
            if hasattr(parent, "uncancel"):
                parent.uncancel()
            raise failed[0] from None
        raise
    finally:
        inside = False
        await cancel_and_reap(task)
    if failed:
        raise failed[0]
