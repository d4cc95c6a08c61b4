"""The fake world's time: real, faster than real, or only moved by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Epoch seconds of the fake world; `scale` of them pass in a real second (0: only advance() moves them)."""

    def __init__(
        self, *, scale: float = 1.0, start: float | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.scale = scale
        self._monotonic = monotonic
        self._began = monotonic()
        self._start = time.time() if start is None else start
        self._advanced_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            return self._start + self._advanced_s + (self._monotonic() - self._began) * self.scale

    def advance(self, seconds: float) -> None:
        """Let `seconds` of the fake world pass at once."""
        if seconds < 0:
            raise ValueError(f"time does not go back: advance({seconds})")
        with self._lock:
            self._advanced_s += seconds
