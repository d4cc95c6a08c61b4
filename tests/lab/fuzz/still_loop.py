"""An event loop in which nothing ever happens: for code that asks for one to make futures and timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


class StillLoop:
    def time(self) -> float:
        return 1000.0

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        return Handle()

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Handle:
        return Handle()

    call_later = call_at

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A future whose exception nobody took."""


class Handle:
    def cancel(self) -> None: ...


@contextmanager
def still_loop() -> Iterator[StillLoop]:
    loop = StillLoop()
    asyncio._set_running_loop(loop)
    try:
        yield loop
    finally:
        asyncio._set_running_loop(None)


def to_its_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing. Raises what it raises."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("it waits for something that will not come")
