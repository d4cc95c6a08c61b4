"""Kill or signal a rented run at each step of its life, and see that nothing stays rented, and thanks to which net.

    python -m tests.lab.rent_kill_table [--only WORD ...] [--every N] [--jobs N] [--real-times]

First the grid with every net in place, then each net (reaper, dead-man, next start) with the other two switched off.
A cell's net is whoever ended the last instance. Each step is held until the deed is done: the fake has not answered, or
a pip, a node or a worker stands still. The dead-man's silence and lifetime are shortened to seconds.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.lab.jobs import in_order
from tests.lab.marked import marked
from tests.lab.rented import KEY, WITH_BOOT, Deed, Lab, rented

ACTIONS = ("SIGKILL", "SIGTERM", "SIGINT", "all at once")
EVENTS = {  # and how many instances there are then
    "before intent": 0,
    "after intent": 0,
    "during create": 1,
    "before the reply": 1,
    "while loading": 2,
    "in boot": 2,
    "in gather": 2,
    "in model load": 2,
    "mid-decode": 2,
    "in destroy": 2,
}
SAID = {  # the line of the run's stderr that marks the event; the others are seen by the fake
    "in boot": "stage 1: it has our code",
    "in gather": "phase gather",
    "in model load": "phase load",
    "mid-decode": "token  3/",
}
STILL = {"in model load": "hang@load", "mid-decode": "gate@9"}  # what keeps a worker in the event
BOOTED = tuple(EVENTS)[5:]  # a dead-man has heard of its orchestrator by then
EXITS = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130, "all at once": -9}
HEARD = "ending the stages"  # what a run says to a signal
SILENCE_S = 30  # of a dead-man that has heard of its orchestrator; more than a boot's 20 s from one watch to the next
LIFETIME_S = 8  # of one that never has
CREATE_EXCHANGE_S = 5.0  # for a create without an answer; then a signalled run has 64 of the fake's seconds left
WITHIN_S, NET_WITHIN_S = 60.0, 150.0
SAID_CHARS = 6000


@dataclass(frozen=True)
class Cell:
    """alone: the one net that is left, "" for all of them."""

    action: str
    event: str
    alone: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.event}" + (f", {self.alone} alone" if self.alone else "")

    @property
    def signalled(self) -> bool:
        """Can the run still act?"""
        return self.action in ("SIGTERM", "SIGINT")

    @property
    def net(self) -> str:
        """Who ends what is rented."""
        if not EVENTS[self.event]:
            return "nothing to end"
        if self.signalled:
            return "itself"
        if self.alone:
            return self.alone
        if self.action == "SIGKILL":
            return "reaper"
        return "dead-man" if self.event in BOOTED else "next start"


@dataclass(frozen=True)
class Outcome:
    """seconds: from the deed until nothing was rented; net: "itself", a net, "nothing to end", or "LEFT"; said: the
    end of what the run said."""

    status: int | None
    seconds: float
    net: str
    rented: int
    live: int
    decoys: int
    said: str

    def fits(self, cell: Cell) -> bool:
        return (
            self.status == EXITS[cell.action]
            and self.net == cell.net
            and self.rented == EVENTS[cell.event]
            and self.live == self.decoys == 0
        )


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
    """The deed, done once, from whichever thread sees its moment; whoever else sees it waits until it is done."""

    def __init__(self, cell: Cell, lab: Lab) -> None:
        self.at: float | None = None
        self.heard = threading.Event()  # the run has said that it was signalled
        self.created = threading.Event()  # a create has had its effect
        self._cell, self._lab = cell, lab
        self._run: subprocess.Popen[str] | None = None
        self._running = threading.Event()
        self._lock = threading.Lock()

    def on(self, run: subprocess.Popen[str]) -> None:
        self._run = run
        self._running.set()

    def strike(self, *_: Any) -> None:
        """In the middle of a call that the fake has not answered: it goes on once the run is dead, or says so."""
        with self._lock:
            if self.at is None:
                self._do()
                if self._cell.signalled and not self.heard.wait(WITHIN_S):
                    raise TimeoutError("the run did not hear its signal")

    def strike_now(self, *_: Any) -> None:
        """On the thread that reads what the run says, which therefore cannot wait for more of it."""
        with self._lock:
            if self.at is None:
                self._do()

    def _do(self) -> None:
        if not self._running.wait(WITHIN_S):
            raise TimeoutError("there is no run")
        assert self._run is not None
        self.at = time.monotonic()
        if self._cell.action == "all at once":
            stopped: set[int] = set()
            while more := {process.pid for process in marked(str(self._lab.home / "tmp"))} - stopped:
                self._send(more, signal.SIGSTOP)  # one that was starting another meanwhile has not got far
                stopped |= more
            self._send(stopped, signal.SIGKILL)
        else:
            self._send({self._run.pid}, getattr(signal, self._cell.action))
        if not self._cell.signalled:
            self._run.wait()

    @staticmethod
    def _send(pids: set[int], number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _arm(cell: Cell, lab: Lab, attack: _Attack) -> tuple[Deed, ...]:
    """Have the attack strike at the cell's event."""
    fake, event = lab.fake, cell.event
    heard = Deed(HEARD, lambda *_: attack.heard.set())
    if event in SAID:
        if event == "in boot":
            for stage in (0, 1):
                lab.hold("pip", stage=stage)
        elif event == "in gather":
            lab.hold("node", stage=1)
        return (Deed(SAID[event], attack.strike_now),)
    if event == "before intent":
        fake.on("search", "after", attack.strike)
    elif event == "after intent":  # the request has arrived, and has no effect and no answer
        fake.fault("create.hang", None)
        fake.on("create", "arrival", attack.strike)
    elif event == "during create":
        fake.on("create", "before", attack.strike)
        fake.on("create", "after", lambda *_: attack.created.set())
    elif event == "before the reply":
        fake.on("create", "after", attack.strike)
    elif event == "in destroy":
        fake.on("destroy", "after", attack.strike)
    elif event == "while loading":
        fake.fault("machine.stuck-loading", None)
        fake.on("list", "after", partial(_strike_while_loading, lab, attack))
    return (heard,) if cell.signalled else ()


def _strike_while_loading(lab: Lab, attack: _Attack, *_: Any) -> None:
    """Once both are loading and have been listed as such; then they go on to run."""
    live = [lab.fake.instance(line["id"]) for line in lab.fake.ledger()["live"]]
    if attack.at is None and [one.phase(lab.fake.clock.now()).status for one in live] == ["loading"] * 2:
        attack.strike()
        for instance in live:
            lab.fake.come_up(instance.id)


def run_cell(cell: Cell, folder: Path, *, times: Literal["short", "real"] = "short") -> Outcome:
    boots = cell.event in BOOTED or cell.alone == "dead-man"
    worker = {"STILL_FAULT": STILL[cell.event]} if cell.event in STILL else {}
    scale = WITH_BOOT if cell.event == "after intent" else None  # a create that hangs takes real time
    with rented(folder, boots=boots, worker=worker, scale=scale) as lab:
        if boots and cell.alone in ("reaper", "next start"):
            lab.fake.fault("machine.no-key", None)
        attack = _Attack(cell, lab)
        if times == "short":
            lab.give(PPSMOKE_NODE_SILENCE_S=str(SILENCE_S))
            if cell.event == "while loading":
                lab.give(PPSMOKE_NODE_LIFETIME_S=str(LIFETIME_S))
        deeds = _arm(cell, lab, attack)
        began = time.monotonic()
        patch = {"ppsmoke.rent.vast_api.CREATE_EXCHANGE_S": CREATE_EXCHANGE_S} if cell.event == "after intent" else {}
        run = lab.start("--vastai", "--json", "-v", "--model", lab.model, patch=patch)
        attack.on(run)
        ended = lab.end_of(run, began, deeds)
        if cell.event == "during create" and not attack.created.wait(WITHIN_S):
            raise TimeoutError("no create had an effect")
        net = _net(cell, lab)
        seconds = time.monotonic() - (attack.at or began)
        ledger = lab.fake.ledger()
        rentals = len(ledger["live"]) + len(ledger["ended"])
        live, said = len(ledger["live"]), ended.stderr[-SAID_CHARS:]
        return Outcome(ended.status, seconds, net, rentals, live, ledger["decoys_touched"], said)


def _net(cell: Cell, lab: Lab) -> str:
    """Give the cell's net its chance; whoever ended the last instance, told by whose key its end was asked for with."""
    started_again = False
    if lab.fake.ledger()["live"]:
        if cell.net == "next start":
            started_again = lab.command("reap").status == 0
        elif not cell.signalled:
            lab.settled(NET_WITHIN_S)
    ledger = lab.fake.ledger()
    if ledger["live"]:
        return "LEFT"
    if not ledger["ended"]:
        return "nothing to end"
    last = [request for request in lab.fake.requests if request.method == "DELETE"][-1]
    if last.key != KEY:
        return "dead-man"
    return "itself" if cell.signalled else "next start" if started_again else "reaper"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cells whose name holds one of these")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th cell")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time, each with a fake of its own")
    parser.add_argument("--real-times", action="store_true", help="the dead-man's own 120 s, not shortened")
    options = parser.parse_args(argv)
    chosen = [cell for cell in cells() if not options.only or any(word in str(cell) for word in options.only)]
    chosen = chosen[:: options.every]
    bad, began = 0, time.monotonic()
    print("| deed | when | net | exit | s until empty | rented | left | decoys touched | as claimed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    work = partial(_line, times="real" if options.real_times else "short")
    for line in in_order(work, chosen, jobs=options.jobs):
        print(line, flush=True)
        bad += not line.endswith("| yes |")
    print(f"\n{len(chosen)} cells, {bad} not as claimed, in {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def _line(cell: Cell, *, times: Literal["short", "real"]) -> str:
    """The cell, run and printed."""
    with tempfile.TemporaryDirectory(prefix="ppsmoke-kill-") as folder:
        try:
            outcome = run_cell(cell, Path(folder), times=times)
        except Exception as error:
            return f"| {cell.action} | {cell.event} | | | | | | | NO: {type(error).__name__}: {error} |"
    net = outcome.net + (f" ({cell.alone} alone)" if cell.alone else "")
    fits = "yes" if outcome.fits(cell) else f"NO, {cell.net} and {EVENTS[cell.event]} rented:\n{outcome.said}"
    return (f"| {cell.action} | {cell.event} | {net} | {outcome.status} | {outcome.seconds:.1f} | {outcome.rented} | "
            f"{outcome.live} | {outcome.decoys} | {fits} |")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
