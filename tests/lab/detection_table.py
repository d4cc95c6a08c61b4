"""How soon a run notices what happens to it, in real time, and what it says: one row per misfortune.

    python -m tests.lab.detection_table [--only NAME ...] [--jobs N] [--list]

Home asks from behind a NAT, both stages sit behind others with mapped ports; the product's own command and nodes, over
the NAT lab (needs root). "s" counts from the deed, or from waking, to the exit of the command. 1 if a row is not as
claimed.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.peer import LINK_GRACE_S
from ppsmoke.cluster.swim_state import Config
from ppsmoke.smoke import ASK_SILENCE_S
from ppsmoke.stage_node import ORCHESTRATOR_GONE_S
from tests.lab.nat_lab.lab import why_not
from tests.lab.nat_lab.placed_run import Ended, PlacedRun, placed_run
from tests.lab.nat_lab.spec import Site

MAPPED = (
    Site(hosts=("home",), nat="nat-preserving"),
    Site(hosts=("stage-0",), nat="nat-preserving", mapped=frozenset({"stage-0"})),
    Site(hosts=("stage-1",), nat="nat-preserving", mapped=frozenset({"stage-1"})),
)
RELAYED = (MAPPED[0], Site(hosts=("stage-0",), nat="nat-fully-random"), MAPPED[2])  # home and stage 0 by way of stage 1
BOTH = frozenset({"stage-0", "stage-1"})
PARTED = (  # on one host without hairpin: home, which dials both, relays for them
    MAPPED[0],
    Site(hosts=("stage-0", "stage-1"), nat="nat-preserving", mapped=BOTH, neighbours="isolated"),
)
# SWIM's patience where somebody was accused wrongly before, and both accusers' pings: until link and membership agree.
PATIENT_S = Config().suspicion_min * Config().patience_percent / 100e6
SILENT_S = max(LinkTiming().down_after_s, PATIENT_S + 4.0)
LOCAL_S = 3.0  # for what is told at once on a busy machine: a round trip, the last words, the end of the run
SLEEP_S = 40.0  # longer than any silence that a run bears
LONG_SLEEP_S = ORCHESTRATOR_GONE_S + LinkTiming().down_after_s + 10.0  # longer than stages wait for their run
RUN_BUDGET_S = 200.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """deed: what is done once the third token is there. within_s: of the exit after it; None: nothing may happen, and
    the run ends when it is done. says: patterns that the error must hold. slow_s: of a worker's step. tokens: how many
    to ask for."""

    name: str
    deed: Callable[[PlacedRun], None]
    within_s: float | None
    says: tuple[str, ...] = ()
    sites: tuple[Site, ...] = MAPPED
    tokens: int = 1000
    slow_s: float = 0.1


def cut_off(run: PlacedRun) -> None:
    run.lab.cut("stage-1")


def block_udp(run: PlacedRun) -> None:
    run.lab.rebuild("home", udp="blocked")


def suspend(seconds: float, clock: str) -> Callable[[PlacedRun], None]:
    return lambda run: run.suspend(seconds, clock=clock)


def suspend_and_forget(run: PlacedRun) -> None:
    """Home's router forgets all about it meanwhile, and nobody answers on what it had open."""
    run.lab.forget_connections("home")
    run.suspend(SLEEP_S, clock="stands")


def suspend_and_move(run: PlacedRun) -> None:
    """Home has another address when it wakes: what it had open gets no answer, not even a refusal."""
    run.suspend(SLEEP_S, clock="stands", meanwhile=lambda: run.lab.rebuild("home", nat="firewall-drop"))


LOST = ("ask, stage 1: ",)
SILENT = (*LOST, r"no (byte|link) for \d+ s")
ROWS = (
    Row(name="the worker of a stage is killed", within_s=LOCAL_S, says=("ask, stage 1: ", "killed by signal 9"),
        deed=lambda run: run.signal_worker("stage-1", signal.SIGKILL)),
    Row(name="a stage's node is killed", within_s=LINK_GRACE_S + LOCAL_S, says=LOST,
        deed=lambda run: run.kill("stage-1")),
    Row(name="a host is cut off silently", within_s=SILENT_S + LOCAL_S, says=SILENT, deed=cut_off),
    Row(name="a stage is frozen", within_s=SILENT_S + LOCAL_S, says=SILENT,
        deed=lambda run: run.freeze("stage-1")),
    Row(name="the worker of a stage is frozen", within_s=ASK_SILENCE_S + LOCAL_S,
        says=("ask, stage 1: ", f"nothing has moved for {ASK_SILENCE_S:g} s"),
        deed=lambda run: run.signal_worker("stage-1", signal.SIGSTOP)),
    Row(name="UDP alone is blocked", within_s=None, deed=block_udp, tokens=200),
    Row(name="the stage that relays is killed", within_s=LINK_GRACE_S + LOCAL_S, says=LOST, sites=RELAYED,
        deed=lambda run: run.kill("stage-1")),
    Row(name="the stage that relays is cut off", within_s=LinkTiming().down_after_s + LINK_GRACE_S + LOCAL_S, says=LOST,
        sites=RELAYED, deed=cut_off),  # nobody is left to confirm a suspicion, so the link alone decides
    Row(name="the laptop sleeps, and its clock with it", within_s=None, deed=suspend(SLEEP_S, "stands"), tokens=250),
    Row(name="the laptop stands still, its clock does not", within_s=None, deed=suspend(SLEEP_S, "goes on"),
        tokens=250),
    Row(name="the laptop sleeps and its router forgets", within_s=None, deed=suspend_and_forget, tokens=250),
    Row(name="the laptop wakes on another network", within_s=None, deed=suspend_and_move, tokens=250),
    Row(name="the answer is there before the laptop wakes", within_s=None, deed=suspend(1.5 * SLEEP_S, "stands"),
        tokens=170),
    Row(name="the laptop that relays for its stages sleeps", within_s=None, deed=suspend(SLEEP_S, "stands"),
        sites=PARTED, tokens=100),
    Row(name="the laptop sleeps for longer than stages wait", within_s=LINK_GRACE_S + LOCAL_S, says=("stood still",),
        deed=suspend(LONG_SLEEP_S, "stands")),
)  # fmt: skip


def run_row(row: Row) -> Ended:
    worker = {"STILL_SLOW_S": str(row.slow_s), "STILL_CONTEXT": "2000"}
    arguments = ("--max-tokens", str(row.tokens))
    return placed_run(row.sites, at="token  3/", do=row.deed, arguments=arguments, worker=worker, within_s=RUN_BUDGET_S)


def complaints(row: Row, ended: Ended, allowance_s: float = 0.0) -> list[str]:
    """What is not as claimed. allowance_s: on top of the row's bound, where other work runs beside it."""
    if row.within_s is None:
        if ended.status:
            return [f"exit status {ended.status}, where nothing may happen: {ended.message}"]
        return [] if ended.text_is_right else ["the answer is wrong"]
    found = [] if ended.status == 1 else [f"exit status {ended.status}"]
    found += [f"{words!r} was not said" for words in row.says if not re.search(words, ended.message)]
    found += [] if ended.seconds <= row.within_s + allowance_s else [f"it took {ended.seconds:.1f} s"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.detection_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=4, help="so many rows at once: they mostly wait (4)")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if not options.only or any(words in row.name for words in options.only)]
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    print("| what happens | exit | s | at most | last words | as claimed |\n| --- | --- | --- | --- | --- | --- |")
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for row, ended in zip(rows, pool.map(run_row, rows), strict=True):
            wrong = complaints(row, ended)
            failed += bool(wrong)
            bound = "-" if row.within_s is None else f"{row.within_s:g}"
            verdict = f"NO: {'; '.join(wrong)}" if wrong else "yes"
            cells = (row.name, ended.status, f"{ended.seconds:.1f}", bound, ended.message or "the answer", verdict)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
