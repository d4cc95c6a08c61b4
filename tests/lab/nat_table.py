"""The table of issue 4: which path every pair of nodes ends on, behind every combination of routers. Real nodes.

python -m tests.lab.nat_table [--cells named|ci|all|NAME,NAME...] [--run] [--json FILE]: prints a row per cell; 1 if a
cell did not do what expected.py says. Stage 0 / stage 1 / home. A word has a letter per pair, home to stage 0, home to
stage 1, stage 0 to stage 1: Direct, Punched, Relayed, x impossible, ? the two ends disagree. Before it stands the word
that was expected; after it, pair by pair: seconds to the first message, and since when it has been on its path. With
--run the stages are the product's own, a request is asked, and its token ids are held against llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import IO

from tests.lab.nat_lab.expected import IN_CI, NAMED, PAIRS, Cell, expected, whole_table
from tests.lab.nat_lab.lab import NatLab, why_not
from tests.lab.nat_lab.meeting import Outcome, outcome_json, play
from tests.lab.nat_lab.real_run import run_for_real, warm_workers
from tests.lab.nat_lab.spec import sites_of
from tests.lab.nat_lab.warm_workers import WarmWorkers

DELAYS_MS = {"home": 20.0, "stage-0": 10.0, "stage-1": 15.0}  # one way, of each cable


def build(cell: Cell, *, seed: int = 0) -> NatLab:
    return NatLab(sites_of(cell), seed=seed)


def set_delays(lab: NatLab, scale: float = 1.0) -> None:
    for name in DELAYS_MS:
        if lab.host(name).site == name:  # neighbours share a cable
            lab.edge(name).set(delay_ms=DELAYS_MS[name] * scale)


def run_cell(cell: Cell, *, seed: int = 0) -> Outcome:
    """The cell with agents alone: paths, and times."""
    with build(cell, seed=seed) as lab:
        set_delays(lab)
        return play(cell, lab)


def infer_in_cell(cell: Cell, workers: WarmWorkers, *, seed: int = 0) -> Outcome:
    """The cell with real stages and a real request."""
    with build(cell, seed=seed) as lab:
        set_delays(lab)
        return run_for_real(cell, lab, workers)


def chosen(text: str) -> list[tuple[str, Cell]]:
    """Raises ValueError naming what is no cell."""
    match text:
        case "named":
            return [(name, cell) for name, (cell, _) in NAMED.items()]
        case "ci":
            return [(name, NAMED[name][0]) for name in IN_CI]
        case "all":
            return [(str(cell), cell) for cell in whole_table()]
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMED]:
        raise ValueError(f"no such cell: {', '.join(unknown)}; there are named, ci, all, {', '.join(NAMED)}")
    return [(name, NAMED[name][0]) for name in names]


def rows(outcome: Outcome) -> Iterator[str]:
    firsts, paths = (
        " ".join("    -" if times[pair] is None else f"{times[pair]:5.2f}" for pair in PAIRS)
        for times in (outcome.first_s, outcome.path_s)
    )
    run = outcome.run
    ran = "" if run is None else f"  run {run.verdict} {run.seconds:5.2f} s"
    yield f"{outcome.expected.word}  {outcome.word}  first {firsts}  path {paths}{ran}"
    if outcome.message:
        yield f"    after {outcome.failed_after_s:.1f} s: {outcome.message}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.nat_table", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cells", default="named", type=_cells, help="named, ci, all (150), or names with commas")
    parser.add_argument("--expected", action="store_true", help="print what is expected, and measure nothing")
    parser.add_argument("--run", action="store_true", help="with a real request to real stages in every cell")
    parser.add_argument("--jobs", type=int, default=1, help="so many cells at once; their times are worth less then")
    parser.add_argument("--json", metavar="FILE", help="a line per cell")
    parser.add_argument("--seed", type=int, default=0, help="of every drawn port")
    options = parser.parse_args()
    if options.expected:
        for name, cell in options.cells:
            print(f"{expected(cell).word}  {name}" + (f"  ({cell})" if name in NAMED else ""))
        return 0
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    with open(options.json, "a") if options.json else nullcontext() as file:
        return _measure(options, file)


def _cells(text: str) -> list[tuple[str, Cell]]:
    try:
        return chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def outcomes(
    cells: Sequence[tuple[str, Cell]], *, jobs: int, real: bool, seed: int = 0
) -> Iterator[tuple[str, Outcome]]:
    """Each cell's, in their order, so many at once; real: with real stages, whose workers all of them share."""
    with ExitStack() as stack:
        if real:
            workers = stack.enter_context(warm_workers())
            measure = partial(infer_in_cell, workers=workers, seed=seed)
        else:
            measure = partial(run_cell, seed=seed)
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        names = [name for name, _ in cells]
        yield from zip(names, pool.map(measure, [cell for _, cell in cells]), strict=True)


def _measure(options: argparse.Namespace, file: IO[str] | None) -> int:
    began, bad = time.monotonic(), []
    for name, outcome in outcomes(options.cells, jobs=options.jobs, real=options.run, seed=options.seed):
        print("\n".join(_told(name, outcome)), flush=True)
        if outcome.complaints():
            bad.append(name)
        if file is not None:
            file.write(json.dumps({"name": name, **outcome_json(outcome)}) + "\n")
            file.flush()
    count = len(options.cells)
    print(f"{count - len(bad)} of {count} cells as expected, in {time.monotonic() - began:.0f} s")
    for name in bad:
        print(f"  not as expected: {name}")
    return 1 if bad else 0


def _told(name: str, outcome: Outcome) -> Iterator[str]:
    complaints = outcome.complaints()
    yield name
    yield from (f"  {row}" for row in rows(outcome))
    yield from (f"  ! {complaint}" for complaint in complaints)
    if complaints:
        for agent, lines in outcome.stderr.items():
            yield from (f"    {agent} | {line}" for line in lines[-5:])


if __name__ == "__main__":
    sys.exit(main())
