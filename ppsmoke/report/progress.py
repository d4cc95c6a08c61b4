"""Plain progress lines on stderr and the run's log file: what happens, in which phase and stage, after how long.

A closed terminal or a full disk never ends a run: what cannot be written is dropped.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ppsmoke.errors import printable
from ppsmoke.report.summary import RunRecord

LOADING_LINE_EVERY_S = 1.0
KEPT_LOGS = 20
QUIET, NORMAL, VERBOSE = -1, 0, 1


def open_log(folder: Path, run_id: str) -> TextIO | None:
    """A new log file below `folder`, the oldest of more than KEPT_LOGS removed; None where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[: -KEPT_LOGS + 1]:
            old.unlink(missing_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}.log"
        return open(str(path), "x", buffering=1, opener=lambda path, flags: os.open(path, flags, 0o600))
    except OSError:
        return None


class Progress:
    """Lines for a person and for the log. phase() starts the clock of a phase; record.phases_s gets its seconds."""

    def __init__(
        self, record: RunRecord, *, stream: TextIO | None = None, verbosity: int = NORMAL, log: TextIO | None = None
    ) -> None:
        self.record = record
        self.current_phase = ""
        self._stream = sys.stderr if stream is None else stream
        self._verbosity = verbosity
        self._log = log
        self._started = time.monotonic()
        self._phase_started = self._started
        self._loading_said: dict[int, float] = {}
        if log is not None:
            record.log_path = log.name

    def phase(self, name: str) -> None:
        """The run enters this phase ("" when it has ended)."""
        now = time.monotonic()
        if self.current_phase:
            before = self.record.phases_s.get(self.current_phase, 0.0)
            self.record.phases_s[self.current_phase] = before + now - self._phase_started
        self.current_phase, self._phase_started = name, now
        self.record.total_s = now - self._started
        if name:
            self._write(f"phase {name}", level=VERBOSE)

    def say(self, text: str, *, stage: int | None = None) -> None:
        """A line about the current phase."""
        where = f"{self.current_phase}: " if self.current_phase else ""
        self._write(f"{where}{'' if stage is None else f'stage {stage}: '}{text}", level=NORMAL)

    def loading(self, stage: int, what: str, done: int, total: int) -> None:
        """How far a stage's loading is; at most a line a second for each stage, every one in the log."""
        amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total >= 100_000 else f"{done} of {total}"
        line = f"{self.current_phase}: stage {stage}: {what}" + (f", {amount}" if total else "")
        now = time.monotonic()
        due = now - self._loading_said.get(stage, 0.0) >= LOADING_LINE_EVERY_S
        if due:
            self._loading_said[stage] = now
        self._write(line, level=NORMAL if due else VERBOSE + 1)

    def child_line(self, stage: int, line: str) -> None:
        """A line that a stage's process wrote to its stderr."""
        self._write(f"stage {stage} | {line}", level=VERBOSE)

    def detail(self, text: str) -> None:
        """A fact for -v and the log."""
        self._write(text, level=VERBOSE)

    def close(self) -> None:
        """Close the log. The record keeps its path."""
        if self._log is not None:
            with suppress(OSError):
                self._log.close()
            self._log = None

    def _write(self, text: str, *, level: int) -> None:
        line = f"[{time.monotonic() - self._started:6.1f}s] {printable(text)}"
        if self._log is not None:
            with suppress(OSError, ValueError):
                self._log.write(line + "\n")
        if level <= self._verbosity:
            with suppress(OSError, ValueError):
                self._stream.write(line + "\n")
                self._stream.flush()
