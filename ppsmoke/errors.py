"""The error tree, open to every room: who is at fault, in which phase and stage, what was seen, what to do next.

Rooms raise; cli.py alone prints and picks the exit status. A text never holds a key or a secret.
"""

from __future__ import annotations

import errno
from typing import Any

_OS_HINTS = {
    errno.EMFILE: "raise the limit of open files: ulimit -n 1024",
    errno.ENFILE: "this machine has no file descriptors left",
    errno.ENOMEM: "free memory, or raise the limit: ulimit -v",
    errno.ENOSPC: "make room on the disk",
    errno.EAGAIN: "raise the limit of processes: ulimit -u",
}


def last_words_hint(tail: str) -> str:
    """For the end of a child; tail: what it printed last, the error's detail."""
    if tail.strip():
        return "its last words are below, all of them with -v and in the log"
    return "it printed nothing; somebody, or the machine for want of memory, may have ended it"


def os_hint(error: BaseException) -> str:
    """What to do about a resource that this machine refused, "" if the error is none of these."""
    if isinstance(error, MemoryError):
        return _OS_HINTS[errno.ENOMEM]
    return _OS_HINTS.get(error.errno or 0, "") if isinstance(error, OSError) else ""


class SmokeError(Exception):
    """A run, or a command, that failed for a known cause.

    cause: one line, what was seen.
    phase: rent, boot, gather, resolve, load, ask, print or destroy ("" where no run is on).
    stage: the stage's index, None where no single stage is meant. hint: what to do next, one line.
    detail: many lines for -v and for the log's tail (a child's stderr, a traceback), "" where there is none.
    """

    exit_status = 1

    def __init__(
        self, cause: str, *, phase: str = "", stage: int | None = None, hint: str = "", detail: str = ""
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.phase = phase
        self.stage = stage
        self.hint = hint
        self.detail = detail

    def __str__(self) -> str:
        where = self.phase
        if self.stage is not None:
            where = f"{where}, stage {self.stage}" if where else f"stage {self.stage}"
        return f"{where}: {self.cause}" if where else self.cause

    def to_json(self) -> dict[str, Any]:
        """The `error` object of `--json`."""
        return {"phase": self.phase or None, "stage": self.stage, "cause": self.cause, "hint": self.hint or None}


class UsageError(SmokeError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_status = 2


class InputError(SmokeError):
    """Something the user gave (a model, a prompt, a file) cannot be used as it is."""


class GgufError(InputError):
    """A file that is no usable GGUF: truncated, inconsistent, or of a kind we cannot compute."""


class FetchError(SmokeError):
    """A model could not be brought here: no network, a wrong checksum, a server that lies about ranges."""


class EnvironmentLacks(SmokeError):
    """This machine lacks something a stage needs: clang, tinygrad, a newer Python, a GPU driver."""


class DeadlineExceeded(SmokeError):
    """A named wait ran out of time."""


class FrameError(SmokeError):
    """Bytes from a peer that are none of our protocol. The link that brought them is closed. reason: a word for the
    counters."""

    def __init__(self, cause: str, *, reason: str = "", **kwargs: Any) -> None:
        super().__init__(cause, **kwargs)
        self.reason = reason


class MessageError(SmokeError):
    """A message that does not decode, or whose fields contradict each other; the text names the field."""


class LinkError(SmokeError):
    """A link that could not be made or was refused (wrong key, other version, other model). reason: a word for the
    counters."""

    def __init__(self, cause: str, *, reason: str = "", **kwargs: Any) -> None:
        super().__init__(cause, **kwargs)
        self.reason = reason


class LinkLost(SmokeError):
    """A peer that is needed has been out of reach for longer than a run can bear. peer: its node id, "" if unknown."""

    def __init__(self, cause: str, *, peer: str = "", **more: Any) -> None:
        super().__init__(cause, **more)
        self.peer = peer


class StageError(SmokeError):
    """A stage could not do its part; `stage` says which."""


class WorkerLost(StageError):
    """A stage's worker process ended or stopped answering."""


class WorkerRefused(StageError):
    """A worker answered a request with an error and lives on; kind is the worker's word for it."""

    def __init__(self, cause: str, *, kind: str = "", **kwargs: Any) -> None:
        super().__init__(cause, **kwargs)
        self.kind = kind


class RentError(SmokeError):
    """No machine to run on: no offer fits, a create was refused, a host never came up."""


class DestroyFailed(SmokeError):
    """Something could not be confirmed as ended; the text names each and what ends it. Outranks all else."""


class Interrupted(SmokeError):
    """A signal ended the run; everything was cleaned up. Exit status 128 + the signal's number."""

    def __init__(self, signal_number: int, *, phase: str = "") -> None:
        super().__init__(f"interrupted by signal {signal_number}", phase=phase)
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number


def printable(text: str) -> str:
    """Text of a server, a host or a model without what could move a terminal's cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def one_line(text: str) -> str:
    """The same, where one line is meant: nobody else's words can look like a line of ours."""
    return printable(text).replace("\n", "?").replace("\t", " ")
