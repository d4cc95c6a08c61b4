"""Kill each kind of process of a run, or signal it, at each event of the run, and see what is left.

    python -m tests.lab.kill_table --model PATH [--only ACTION:EVENT ...]

A row: what was done when, the exit status, the seconds until everything was gone, what was said, what was left over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppsmoke.package import own_command
from tests.lab.marked import Process, marked

EVENTS = {  # event: the line of `-v` that marks it
    "starting": re.compile(r"phase rent"),
    "gathering": re.compile(r"phase gather"),
    "loading": re.compile(r"phase load"),
    "prefill": re.compile(r"stage \d+: prefill"),
    "mid-decode": re.compile(r"stage \d+: token .*\b(?:[2-9]\d|1\d\d)/"),
    "ending": re.compile(r"phase destroy"),
}
ACTIONS = ("kill worker", "kill node", "kill orchestrator", "SIGINT", "SIGTERM", "SIGHUP")
RUN_BUDGET_S = 120.0
GONE_BUDGET_S = 20.0  # an orphaned worker that compiles ends within two; more is a leak
LONG_PROMPT = "the quick brown fox jumps over the lazy dog and runs away " * 20


@dataclass(frozen=True)
class Row:
    """What became of one run. seconds: from the deed to the last process's end."""

    action: str
    event: str
    status: int | None
    seconds: float
    message: str
    left: list[str]
    said: dict
    done: bool  # False where there was nothing to kill yet

    @property
    def clean(self) -> bool:
        return not self.left


def run_case(action: str, event: str, model: str, *, stage: int = 1, more: tuple[str, ...] = ()) -> Row:
    """Start a run, do `action` when `event` is seen on its stderr, wait for its end, look for what is left."""
    with tempfile.TemporaryDirectory(prefix="ppsmoke-kill-") as folder:
        marker = str(Path(folder) / "tmp")
        os.mkdir(marker)
        shm_before = set(os.listdir("/dev/shm"))
        environment = os.environ | own_command()[1] | {"TMPDIR": marker, "XDG_STATE_HOME": f"{folder}/state"}
        command = [*own_command()[0], "--model", model, "--json", "-v", "--prompt", LONG_PROMPT]
        run = subprocess.Popen(
            [*command, "--max-tokens", "400", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=environment,
            text=True,
            start_new_session=True,
        )
        lines: list[str] = []
        deed = _Deed(action, EVENTS[event], marker, run.pid, stage)
        reader = threading.Thread(target=_read, args=(run.stderr, lines, deed), daemon=True)
        reader.start()
        try:
            stdout = _read_all(run)
            run.wait(RUN_BUDGET_S)
        finally:
            run.kill()
        left, ended_at = _wait_until_gone(marker)
        reader.join(5)
        left += [f"temporary file {name}" for name in sorted(os.listdir(marker))]
        left += [f"shared memory {name}" for name in sorted(set(os.listdir("/dev/shm")) - shm_before)]
        message = next((line for line in reversed(lines) if line.startswith("ppsmoke: ")), "")
        said = json.loads(stdout) if stdout.strip().startswith("{") else {}
        began = deed.at or ended_at
        return Row(action, event, run.returncode, ended_at - began, message, left, said, deed.done)


class _Deed:
    """Done once, at the first line that matches."""

    def __init__(self, action: str, line: re.Pattern[str], marker: str, orchestrator: int, stage: int) -> None:
        self.at: float | None = None
        self.done = False
        self._action, self._line, self._marker = action, line, marker
        self._orchestrator, self._stage = orchestrator, stage

    def see(self, line: str) -> None:
        if self.at is None and self._line.search(line):
            self.at = time.monotonic()
            victim, number = self._victim()
            if victim is not None:
                self.done = True
                os.kill(victim, number)

    def _victim(self) -> tuple[int | None, int]:
        if self._action.startswith("SIG"):
            return self._orchestrator, getattr(signal, self._action)
        if self._action == "kill orchestrator":
            return self._orchestrator, signal.SIGKILL
        processes = marked(self._marker)
        nodes = [process for process in processes if process.kind == "node"]
        found: list[Process] = nodes
        if self._action == "kill worker":
            of_node = {process.pid: index for index, process in enumerate(nodes)}
            found = sorted(
                (process for process in processes if process.kind == "worker" and process.parent in of_node),
                key=lambda process: of_node[process.parent],
            )
        return (found[min(self._stage, len(found) - 1)].pid if found else None), signal.SIGKILL


def _read(stream, lines: list[str], deed: _Deed) -> None:
    for line in stream:
        lines.append(line.rstrip())
        deed.see(line)


def _read_all(run: subprocess.Popen[str]) -> str:
    """stdout to its end, or what came within RUN_BUDGET_S (then the run is killed)."""
    timer = threading.Timer(RUN_BUDGET_S, run.kill)
    timer.start()
    try:
        return run.stdout.read()
    finally:
        timer.cancel()


def _wait_until_gone(marker: str) -> tuple[list[str], float]:
    """What is still alive after GONE_BUDGET_S (and is killed), and when the last one ended."""
    deadline = time.monotonic() + GONE_BUDGET_S
    pause = threading.Event()
    while (alive := marked(marker)) and time.monotonic() < deadline:
        pause.wait(0.05)
    ended = time.monotonic()
    for process in alive:
        os.kill(process.pid, signal.SIGKILL)
    return [f"{process.kind} {process.command[:60]}" for process in alive], ended


def main(say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", nargs="*", default=[], metavar="ACTION:EVENT")
    arguments = parser.parse_args()
    dirty = 0
    say("| what | when | exit | s to the end | said | left over |\n| --- | --- | --- | --- | --- | --- |")
    for event in EVENTS:
        for action in ACTIONS:
            if arguments.only and f"{action}:{event}" not in arguments.only:
                continue
            row = run_case(action, event, arguments.model)
            dirty += not row.clean
            what = action if row.done else f"{action} (none alive)"
            left = ", ".join(row.left) or "nothing"
            say(f"| {what} | {event} | {row.status} | {row.seconds:.2f} | {row.message} | {left} |")
            sys.stdout.flush()
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
