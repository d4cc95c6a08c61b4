"""Lines out of a pipe: split as they come, bounded, without a task that could die and leave the writer blocked."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable


class LineReader(asyncio.Protocol):
    """Calls on_line with each line, without its newline; `ended` is set when the pipe has ended.

    A line longer than limit goes to on_overflow instead, in pieces of about that size, and never piles up.
    """

    def __init__(self, on_line: Callable[[bytes], None], *, limit: int, on_overflow: Callable[[bytes], None]) -> None:
        self.ended = asyncio.Event()
        self._on_line = on_line
        self._limit = limit
        self._on_overflow = on_overflow
        self._pending = bytearray()

    def data_received(self, data: bytes) -> None:
        head, newline, rest = data.partition(b"\n")
        self._pending += head
        if newline:
            line, self._pending = bytes(self._pending), bytearray()
            self._on_line(line)
            *lines, tail = rest.split(b"\n")
            for line in lines:
                self._on_line(line)
            self._pending += tail
        if len(self._pending) > self._limit:
            beginning, self._pending = bytes(self._pending), bytearray()
            self._on_overflow(beginning)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pending:
            line, self._pending = bytes(self._pending), bytearray()
            self._on_line(line)
        self.ended.set()


class StderrTail:
    """A worker's stderr: its lines go on to ours with a prefix, and the last are kept for an error's detail."""

    MAX_LINE_BYTES = 8 << 10
    MAX_TAIL_BYTES = 16 << 10

    def __init__(self, prefix: str = "worker | ") -> None:
        self._prefix = prefix
        self._lines: deque[str] = deque()
        self._size = 0

    def add(self, line: bytes) -> None:
        text = line[-self.MAX_LINE_BYTES :].decode("utf-8", "backslashreplace").rstrip("\r")
        self._lines.append(text)
        self._size += len(text) + 1
        while self._size > self.MAX_TAIL_BYTES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft()) + 1
        try:
            sys.stderr.write(f"{self._prefix}{text}\n")
        except (OSError, ValueError):  # whoever read our stderr has gone; the worker must not block for that
            pass

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            pass

    def text(self) -> str:
        return "\n".join(self._lines)
