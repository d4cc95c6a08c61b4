"""The other end of an agent's pipes: its starter asks, without waiting, and collects the answers when it needs them."""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import Any

from tests.lab.nat_lab.lab import PIPE, LabNode

END_S = 10.0


class AgentFailed(Exception):
    """What an agent answered instead of a result; `hint` is its error's."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


class Answer(Future[Any]):
    """What came of a request, and when."""

    at = 0.0


class Puppet:
    """An agent in a host of the lab."""

    def __init__(self, node: LabNode, *, python: str = sys.executable) -> None:
        self.name = node.name
        self.process = node.popen([python, "-m", "tests.lab.nat_lab.agent"], stdin=PIPE, stderr=PIPE)
        self._ids = itertools.count(1)
        self._open: dict[int, Answer] = {}
        self._lock = threading.Lock()
        self.stderr: list[str] = []
        self._reader = threading.Thread(target=self._read, name=f"agent {self.name}", daemon=True)
        self._reader.start()

    def ask(self, op: str, **arguments: Any) -> Answer:
        """Its result, in time; raises AgentFailed from result()."""
        future = Answer()
        with self._lock:
            number = next(self._ids)
            self._open[number] = future
        try:
            self.process.stdin.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            self._settle(number, AgentFailed(f"{self.name} has ended"))
        return future

    def end(self) -> int:
        """Its exit status, after it has left the cluster."""
        self.process.stdin.close()
        try:
            return self.process.wait(END_S)
        except TimeoutExpired:
            self.process.kill()
            return self.process.wait(END_S)
        finally:
            self._reader.join(END_S)

    def _settle(self, number: int, outcome: Any) -> None:
        with self._lock:
            future = self._open.pop(number, None)
        if future is not None:
            future.at = time.monotonic()
            (future.set_exception if isinstance(outcome, Exception) else future.set_result)(outcome)

    def _read(self) -> None:
        """Answers from its stdout, its last words from its stderr, until both have ended."""
        streams = {pipe.fileno(): b"" for pipe in (self.process.stdout, self.process.stderr)}
        err_fd = self.process.stderr.fileno()
        while streams:
            for fd in select.select(list(streams), [], [])[0]:
                data = os.read(fd, 1 << 16)
                *lines, rest = (streams[fd] + data).split(b"\n")
                for line in lines:
                    if fd == err_fd:
                        self.stderr.append(line.decode(errors="replace"))
                    else:
                        self._take(json.loads(line))
                if data:
                    streams[fd] = rest
                else:
                    del streams[fd]
        for number in list(self._open):
            self._settle(number, AgentFailed(f"{self.name} ended: {' | '.join(self.stderr[-5:])}"))

    def _take(self, answer: dict[str, Any]) -> None:
        outcome = AgentFailed(answer["error"], answer["hint"]) if "error" in answer else answer["result"]
        self._settle(answer["id"], outcome)


def settled(future: Future[Any], within_s: float) -> Any:
    """The result, or the AgentFailed itself, which is a finding too. Raises TimeoutError if neither came."""
    began = time.monotonic()
    with suppress(AgentFailed):
        return future.result(within_s)
    return future.exception(max(0.0, within_s - (time.monotonic() - began)))
