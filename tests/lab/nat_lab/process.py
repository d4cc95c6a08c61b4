"""A process in the lab, as its starter holds it: pipes, signals, and how it ended."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import IO

from tests.lab.nat_lab.kernel import LabError


class NodeProcess:
    """Like subprocess.Popen where it matters: stdin, stdout, stderr (unbuffered, None unless piped), wait, signals.
    Its signals go through a pidfd, so they can never meet another process. When the lab ends, it ends."""

    def __init__(self, args: list[str], pidfd: int, end: int, pipes: tuple[IO[bytes] | None, ...]) -> None:
        self.args = args
        self.stdin, self.stdout, self.stderr = pipes
        self.returncode: int | None = None
        self._pidfd, self._end = pidfd, end
        self.pid = _pid_seen_from_here(pidfd)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; negative: the signal that ended it. Raises TimeoutExpired, or LabError if the lab ended."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise TimeoutExpired(self.args, timeout or 0.0)
            status = os.read(self._end, 16)
            if not status:
                raise LabError(f"the lab ended before {self.args[0]}")
            self.returncode = int(status)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Lets go of its pipes; a process that reads its stdin gets EOF. It is not ended by this."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def release(self) -> None:
        """After its end: everything that is held for it."""
        self.close()
        for fd in (self._pidfd, self._end):
            os.close(fd)


def _pid_seen_from_here(pidfd: int) -> int:
    """The process's pid among the starter's: inside it has another. -1 if it has ended already."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
