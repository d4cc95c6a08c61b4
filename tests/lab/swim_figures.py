"""`python -m tests.lab.swim_figures`: what our SWIM core does in bad weather, beside the figures that it must reach.

Each figure is a mean over seeds with its 95 % bound; "page" is the value that it must not be worse than (swim_page.py).
A long measurement can be split: `--first 50 --seeds 50 --json b.jsonl` does the second half, `--merge a.jsonl b.jsonl`
prints the table of both. What FILE of --json has already is not measured again. Exit status 1: a figure is worse.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ppsmoke.cluster.swim_state import State
from tests.lab.swim_page import rows, table
from tests.lab.virtual_net import VirtualNet, Weather

LONG_S = 600.0  # of the runs in which false alarms are counted
SETTLED_S = 15.0  # joining is over; before it nothing is counted
EVENT_S = 60.0  # when the single events happen
CALM = Weather()
LOSSY = Weather(loss=0.05)
RELAY = Weather(delay_s=0.2, spike=0.05, spike_s=0.3, loss=0.02)
SIZES = (3, 4, 12, 20)
Figures = dict[str, float]


def calm(n: int, seed: int) -> Figures:
    net = VirtualNet(nodes=n, seed=seed, weather=CALM, traced=False).run(until_s=LONG_S)
    return {"packets/s/node": net.packets / LONG_S / n}


def false_alarms(weather: Weather, label: str, *, stalls: bool = False) -> Callable[[int, int], Figures]:
    def measure(n: int, seed: int) -> Figures:
        net = VirtualNet(nodes=n, seed=seed, weather=weather, traced=False)
        if stalls:
            stall_everybody(net, seed)
        net.run(until_s=LONG_S)
        suspected = [c for c in net.changes_to(State.SUSPECT, after_s=SETTLED_S) if c.really_up]
        buried = [c for c in net.changes_to(State.DEAD, after_s=SETTLED_S) if c.really_up]
        return {f"{label}: suspected": len(suspected), f"{label}: buried": len(buried)}

    return measure


def stall_everybody(net: VirtualNet, seed: int) -> None:
    """Every node but the first stands still for 3 to 12 s, about once a minute."""
    for node in list(net.nodes.values())[1:]:
        generator = random.Random(f"{seed}/stall/{node.index}")
        at_s = 30 + generator.random() * 60
        while at_s < LONG_S - 60:
            net.freeze(node.name, from_s=at_s, to_s=at_s + 3 + generator.random() * 9)
            at_s += 30 + generator.random() * 60


def crash(n: int, seed: int) -> Figures:
    last = f"node-{n - 1}"
    net = VirtualNet(nodes=n, seed=seed, traced=False).crash(last, at_s=EVENT_S)
    net.run(until_s=EVENT_S)
    net.run(until_s=EVENT_S + 90, stop=lambda: net.views_of(last) == {State.DEAD})
    times = [c.at_s - EVENT_S for c in net.changes_to(State.DEAD, after_s=EVENT_S) if c.subject == last]
    return {"crash: first": min(times), "crash: all": max(times)}


def restart(n: int, seed: int) -> Figures:
    last, back_s = f"node-{n - 1}", EVENT_S + 90
    net = VirtualNet(nodes=n, seed=seed, traced=False).crash(last, at_s=EVENT_S).restart(last, at_s=back_s)
    return {"restart after 90 s: healed": healed_after(net, back_s)}


def isolation(n: int, seed: int) -> Figures:
    net = VirtualNet(nodes=n, seed=seed, traced=False).isolate("node-1", from_s=EVENT_S, to_s=EVENT_S + 60)
    return {"60 s isolation: healed": healed_after(net, EVENT_S + 60)}


def healed_after(net: VirtualNet, since_s: float) -> float:
    net.run(until_s=since_s)
    net.run(until_s=since_s + 300, stop=net.agree_all_live)
    return net.now_s - since_s


def name(n: int, seed: int) -> Figures:
    net = VirtualNet(nodes=n, seed=seed, weather=LOSSY, traced=False).run(until_s=EVENT_S)
    net.do(f"node-{n - 1}", lambda core, now: core.register(now, "pp-entry", b"stage"))
    net.run(until_s=EVENT_S + 60, stop=lambda: all(node.core.lookup("pp-entry") for node in net.running()))
    return {"name known everywhere": net.now_s - EVENT_S}


SCENARIOS: dict[str, Callable[[int, int], Figures]] = {
    "calm": calm,
    "loss": false_alarms(LOSSY, "loss 5 %"),
    "relay": false_alarms(RELAY, "relay"),
    "stalls": false_alarms(CALM, "stalls", stalls=True),
    "stalls-relay": false_alarms(RELAY, "stalls + relay", stalls=True),
    "crash": crash,
    "restart": restart,
    "isolation": isolation,
    "name": name,
}


class Work(NamedTuple):
    """One run: what, how large, with which chance."""

    scenario: str
    n: int
    seed: int


class Result(NamedTuple):
    """cpu_s: what the run cost."""

    work: Work
    figures: Figures
    cpu_s: float

    def line(self) -> str:
        return json.dumps({**self.work._asdict(), "figures": self.figures, "cpu_s": round(self.cpu_s, 3)})

    @classmethod
    def read(cls, line: str) -> Result:
        fields: dict[str, Any] = json.loads(line)
        return cls(Work(fields["scenario"], fields["n"], fields["seed"]), fields["figures"], fields["cpu_s"])


def measure(work: Work) -> Result:
    began_s = time.process_time()
    figures = SCENARIOS[work.scenario](work.n, work.seed)
    return Result(work, figures, time.process_time() - began_s)


def measure_all(todo: Iterable[Work], *, jobs: int, stop_after_s: float) -> Iterator[Result]:
    """Each result as it comes. After stop_after_s nothing more is begun; what runs then is still waited for."""
    began_s = time.monotonic()
    waiting, running = iter(todo), set[Future[Result]]()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(running) < jobs and time.monotonic() - began_s < stop_after_s and (work := next(waiting, None)):
                running.add(pool.submit(measure, work))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def read_results(paths: Iterable[Path]) -> list[Result]:
    return [Result.read(line) for path in paths for line in path.read_text().splitlines()]


def show(results: list[Result]) -> int:
    """The table, what each size cost, and the exit status."""
    found = rows((result.work.n, result.work.seed, result.figures) for result in results)
    print("\n".join(table(found)))
    for n in sorted({result.work.n for result in results}):
        of_size = [result for result in results if result.work.n == n]
        seeds = len({result.work.seed for result in of_size})
        print(f"n = {n}: {seeds} seeds, {sum(result.cpu_s for result in of_size) / seeds:.1f} s of CPU each")
    return 1 if any(row.verdict.endswith("WORSE") for row in found) else 0


def run(options: argparse.Namespace) -> int:
    results = read_results([options.json]) if options.json and options.json.exists() else []
    have = {result.work for result in results}
    seeds = range(options.first, options.first + options.seeds)
    names = [scenario for scenario in SCENARIOS if options.only in scenario]
    # Seed by seed, the largest first: whatever ends early has whole seeds, and no long run is the last one alone.
    sizes = sorted(options.sizes, reverse=True)
    wanted = {Work(name, n, seed): None for seed in seeds for n in sizes for name in names}  # an ordered set
    todo = [work for work in wanted if work not in have]
    began_s = time.monotonic()
    with options.json.open("a") if options.json else nullcontext() as file:
        for result in measure_all(todo, jobs=options.jobs, stop_after_s=options.stop_after_s):
            results.append(result)
            if file is not None:
                file.write(result.line() + "\n")
                file.flush()
    results = [result for result in results if result.work in wanted]
    status = show(results)
    print(f"{len(results)} of {len(wanted)} runs, {time.monotonic() - began_s:.0f} s")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each scenario (default 5)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0), to split a long measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="cluster sizes (default 3 4 12 20)")
    parser.add_argument("--only", default="", help=f"only scenarios with this in their name: {', '.join(SCENARIOS)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no run after this long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line per run, as it ends")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing, show these results")
    options = parser.parse_args()
    return show(read_results(options.merge)) if options.merge else run(options)


if __name__ == "__main__":
    sys.exit(main())
