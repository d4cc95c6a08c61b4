"""Kill or signal a rented run at each step of its life, and see that nothing stays rented, and thanks to which net.

    python -m tests.lab.rent_kill_table [--only WORD ...] [--every N] [--real-times]

First the grid with every net in place, then each net (reaper, dead-man, next start) with the other two switched off.
A cell's net is whoever ended the last instance. The dead-man's silence and lifetime are shortened to seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.lab.marked import marked
from tests.lab.rented import Deed, Lab, rented

ACTIONS = ("SIGKILL", "SIGTERM", "SIGINT", "all at once")
EVENTS = (
    "before intent",
    "after intent",
    "during create",
    "before the reply",
    "while loading",
    "in boot",
    "in gather",
    "in model load",
    "mid-decode",
    "in destroy",
)
SAID = {  # the line of the run's stderr that marks the event; the others are seen by the fake
    "in boot": "it has our code",
    "in gather": "phase gather",
    "in model load": "phase load",
    "mid-decode": "token  3/",
}
BOOTED = EVENTS[5:]  # a dead-man has heard of its orchestrator by then
NETS = ("reaper", "dead-man", "next start")
EXITS = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130, "all at once": -9}
SILENCE_S, LIFETIME_S = 12.0, 45.0  # a machine that was never heard ends with its lifetime
NET_WITHIN_S = 150.0


@dataclass(frozen=True)
class Cell:
    """alone: the one net that is left, "" for all of them."""

    action: str
    event: str
    alone: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.event}" + (f", {self.alone} alone" if self.alone else "")


@dataclass(frozen=True)
class Outcome:
    """seconds: from the deed until nothing was rented; net: "itself", a net, "nothing to end", or "LEFT"."""

    status: int | None
    seconds: float
    net: str
    rented: int
    live: int
    decoys: int

    def fits(self, cell: Cell) -> bool:
        nets = (cell.alone, "nothing to end") if cell.alone else (*NETS, "itself", "nothing to end")
        return self.status == EXITS[cell.action] and not self.live and not self.decoys and self.net in nets


def cells() -> Iterator[Cell]:
    for event in EVENTS:
        for action in ACTIONS:
            yield Cell(action, event)
    for event in EVENTS:
        yield Cell("SIGKILL", event, "reaper")
        yield Cell("all at once", event, "next start")
    for event in ("while loading", *BOOTED):
        yield Cell("all at once", event, "dead-man")


class _Attack:
    """The deed, done once, from whichever thread sees its moment."""

    def __init__(self, cell: Cell, lab: Lab) -> None:
        self.at: float | None = None
        self._cell, self._lab = cell, lab
        self._run: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def on(self, run: subprocess.Popen[str]) -> None:
        self._run = run

    def strike(self, *_: Any) -> None:
        with self._lock:
            if self.at is not None or self._run is None:
                return
            self.at = time.monotonic()
        victims = [self._run.pid]
        if self._cell.action == "all at once":
            victims = [process.pid for process in marked(str(self._lab.home / "tmp"))]
            self._send(victims, signal.SIGSTOP)
        number = getattr(signal, self._cell.action, signal.SIGKILL)
        self._send(victims, number)
        if number == signal.SIGKILL:
            self._run.wait()

    @staticmethod
    def _send(pids: Sequence[int], number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _arm(cell: Cell, lab: Lab, strike: Callable[..., None]) -> tuple[Deed, ...]:
    """Have the attack strike at the cell's event."""
    fake, event = lab.fake, cell.event
    if event in SAID:
        return (Deed(SAID[event], strike),)
    if event == "before intent":
        fake.on("search", "after", strike)
    elif event == "after intent":  # the request has arrived, and has no effect and no answer
        fake.fault("create.hang", None)
        _when(lambda: any(request.method == "PUT" for request in fake.requests), strike)
    elif event == "during create":
        fake.on("create", "before", strike)
    elif event == "before the reply":
        fake.on("create", "after", strike)
    elif event == "in destroy":
        fake.on("destroy", "after", strike)
    elif event == "while loading":
        account = fake.service.account
        _when(lambda: any(one.phase(fake.clock.now()).status == "loading" for one in account.ours()), strike)
    return ()


def _when(so: Callable[[], bool], strike: Callable[..., None]) -> None:
    """Strike as soon as it is so; looked at from a thread of its own."""

    def look() -> None:
        while not so():
            time.sleep(0.005)
        strike()

    threading.Thread(target=look, daemon=True).start()


def run_cell(cell: Cell, folder: Path, *, times: Literal["short", "real"] = "short") -> Outcome:
    boots = cell.event in BOOTED or cell.alone == "dead-man"
    slow = {"STILL_SLOW_S": "0.1"} if cell.event in ("mid-decode", "in model load") else {}
    # A create without an answer is waited for by the real clock, so that the two must agree.
    scale = 1.0 if cell.event == "after intent" and cell.action in ("SIGTERM", "SIGINT") else None
    with rented(folder, boots=boots, worker=slow, scale=scale) as lab:
        if cell.alone in ("reaper", "next start"):
            lab.fake.fault("machine.no-key", None)
        attack = _Attack(cell, lab)
        deeds = _arm(cell, lab, attack.strike)
        short = {
            "ppsmoke.rent.boot.SILENCE_S": SILENCE_S,
            "ppsmoke.vast_run.LIFETIME_SLACK_S": LIFETIME_S - 390.0 if cell.action == "all at once" else 30.0,
        }
        began = time.monotonic()
        run = lab.start("--vastai", "--json", "-v", "--model", lab.model, patch=short if times == "short" else {})
        attack.on(run)
        ended = lab.end_of(run, began, deeds)
        net = _net(cell, lab)
        seconds = time.monotonic() - (attack.at or began)
        ledger = lab.fake.ledger()
        rentals = len(ledger["live"]) + len(ledger["ended"])
        return Outcome(ended.status, seconds, net, rentals, len(ledger["live"]), ledger["decoys_touched"])


def _net(cell: Cell, lab: Lab) -> str:
    """Wait for the nets that are there, in the order in which they come; whoever ended the last instance."""
    ledger = lab.fake.ledger()
    if not ledger["live"]:
        pending = cell.action in ("SIGKILL", "all at once") and cell.event == "during create"
        if not pending or not _appears(lab):
            ended_by = {"SIGKILL": "reaper", "all at once": "dead-man"}.get(cell.action, "itself")
            return ended_by if lab.fake.ledger()["ended"] else "nothing to end"
    if cell.action in ("SIGTERM", "SIGINT"):
        return "LEFT"
    if cell.alone in ("", "reaper") and cell.action == "SIGKILL" and lab.settled(NET_WITHIN_S) is not None:
        return "reaper"
    if cell.alone in ("", "dead-man") and cell.action == "all at once" and _dead_men(lab):
        if lab.settled(NET_WITHIN_S) is not None:
            return "dead-man"
    if cell.alone in ("", "next start"):
        if lab.command("reap").status == 0 and lab.settled(5.0) is not None:
            return "next start"
    return "LEFT"


def _appears(lab: Lab) -> bool:
    """Does the create that was under way still make an instance?"""
    until = time.monotonic() + 1.0
    while time.monotonic() < until and not (lab.fake.ledger()["live"] or lab.fake.ledger()["ended"]):
        time.sleep(0.02)
    return bool(lab.fake.ledger()["live"])


def _dead_men(lab: Lab) -> bool:
    """Has every live instance a container, or will it have one, with a key of its own?"""
    return lab.fake.isolation != "none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cells whose name holds one of these")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th cell")
    parser.add_argument("--real-times", action="store_true", help="the dead-man's own 120 s, not shortened")
    options = parser.parse_args(argv)
    chosen = [cell for cell in cells() if not options.only or any(word in str(cell) for word in options.only)]
    bad = 0
    print("| deed | when | net | exit | s until empty | rented | left | decoys touched |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for cell in chosen[:: options.every]:
        with tempfile.TemporaryDirectory(prefix="ppsmoke-kill-") as folder:
            outcome = run_cell(cell, Path(folder), times="real" if options.real_times else "short")
        fits = outcome.fits(cell)
        bad += not fits
        net = outcome.net + (f" ({cell.alone} alone)" if cell.alone else "") + ("" if fits else " NO")
        print(f"| {cell.action} | {cell.event} | {net} | {outcome.status} | {outcome.seconds:.1f} | {outcome.rented} | "
              f"{outcome.live} | {outcome.decoys} |", flush=True)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
