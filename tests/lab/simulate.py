"""`python -m tests.lab.simulate`: whole clusters in virtual time, each under faults drawn from its seed.

The nodes are the product's own, from SWIM to links, names, relay, holes and path choice; the event loop, the network,
the clocks and chance are simulated, and a stand-in plays TLS (tests/lab/sim). The same seed gives the same run, byte by
byte.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.lab.sim.faults import FAULTS
from tests.lab.sim.run import Outcome, run

SHOWN = 20  # runs of which the first violation is printed as it is found
CHUNK = 5  # seeds that a process takes at once


def outcomes(seeds: Iterable[int], *, jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.freeze) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=CHUNK)


def summary(done: list[Outcome], *, wall_s: float) -> list[str]:
    faults = sum((one.faults for one in done), Counter())
    paths = sum((one.paths for one in done), Counter())
    nodes = Counter(one.nodes for one in done)
    failed = [one for one in done if one.violations]
    lines = [
        f"{len(done)} runs of {done[0].virtual_s:g} virtual s, {sum(one.virtual_s for one in done):,.0f} in all",
        f"nodes: {', '.join(f'{count} runs of {size}' for size, count in sorted(nodes.items()))}",
        f"faults: {sum(faults.values()):,} ({', '.join(f'{fault.kind} {faults[fault.kind]}' for fault in FAULTS)})",
        f"pairs of nodes ended on: {', '.join(f'{path} {count:,}' for path, count in sorted(paths.items()))}",
        f"messages: {sum(one.delivered for one in done):,} delivered, {sum(one.refused for one in done):,} refused "
        f"because their receiver was lost; the slowest took {max(one.slowest_s for one in done):.1f} s",
        f"all agreed on who lives at the latest {max(one.settled_after_s for one in done):.0f} s after the last fault",
        f"violations: {sum(len(one.violations) for one in failed)} in {len(failed)} runs",
    ]
    if failed:
        lines.append(f"replay one, with its trace: python -m tests.lab.simulate --seed {failed[0].seed}")
    lines.append(
        f"{wall_s:.1f} s of wall clock, {wall_s / len(done):.3f} s a run; "
        f"{sum(one.cpu_s for one in done) / len(done):.3f} s of one core a run"
    )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="how many seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0), to split a long run")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--seed", type=int, help="replay this one, with everything that happened in it")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.seed is not None:
        done = [run(arguments.seed, tell=print)]
        print(f"trace {done[0].trace:08x}")
    else:
        done, failures = [], 0
        for outcome in outcomes(
            itertools.islice(itertools.count(arguments.first), arguments.runs), jobs=arguments.jobs
        ):
            done.append(outcome)
            if outcome.violations and (failures := failures + 1) <= SHOWN:
                print(f"seed {outcome.seed}: {outcome.violations[0]}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{len(done)} of {arguments.runs}", end="", file=sys.stderr, flush=True)
    print("\n".join(summary(done, wall_s=time.monotonic() - began)))
    return 1 if any(one.violations for one in done) else 0


if __name__ == "__main__":
    sys.exit(main())
