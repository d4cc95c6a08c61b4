"""`python -m tests.lab.swim_figures`: what our SWIM core does in bad weather, beside the figures that it must reach.

Each figure is a mean over seeds with its 95 % bound. "page" is what the design was chosen by: an earlier, separate
model of the same parameters, simulated once with five seeds (n = 20: one seed).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from ppsmoke.cluster.swim_state import State
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
    net = VirtualNet(nodes=n, seed=seed, weather=CALM).run(until_s=LONG_S)
    return {"packets/s/node": net.packets / LONG_S / n}


def false_alarms(weather: Weather, label: str, *, stalls: bool = False) -> Callable[[int, int], Figures]:
    def measure(n: int, seed: int) -> Figures:
        net = VirtualNet(nodes=n, seed=seed, weather=weather)
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
    net = VirtualNet(nodes=n, seed=seed).crash(last, at_s=EVENT_S)
    net.run(until_s=EVENT_S)
    net.run(until_s=EVENT_S + 90, stop=lambda: net.views_of(last) == {State.DEAD})
    times = [c.at_s - EVENT_S for c in net.changes_to(State.DEAD, after_s=EVENT_S) if c.subject == last]
    return {"crash: first": min(times), "crash: all": max(times)}


def restart(n: int, seed: int) -> Figures:
    last, back_s = f"node-{n - 1}", EVENT_S + 90
    net = VirtualNet(nodes=n, seed=seed).crash(last, at_s=EVENT_S).restart(last, at_s=back_s)
    return {"restart after 90 s: healed": healed_after(net, back_s)}


def isolation(n: int, seed: int) -> Figures:
    net = VirtualNet(nodes=n, seed=seed).isolate("node-1", from_s=EVENT_S, to_s=EVENT_S + 60)
    return {"60 s isolation: healed": healed_after(net, EVENT_S + 60)}


def healed_after(net: VirtualNet, since_s: float) -> float:
    net.run(until_s=since_s)
    net.run(until_s=since_s + 300, stop=net.agree_all_live)
    return net.now_s - since_s


def name(n: int, seed: int) -> Figures:
    net = VirtualNet(nodes=n, seed=seed, weather=LOSSY).run(until_s=EVENT_S)
    net.do(f"node-{n - 1}", lambda core, now: core.register(now, "pp-entry", b"stage"))
    net.run(until_s=EVENT_S + 60, stop=lambda: all(node.core.lookup("pp-entry") for node in net.running()))
    return {"name known everywhere": net.now_s - EVENT_S}


SCENARIOS: list[Callable[[int, int], Figures]] = [
    calm,
    false_alarms(LOSSY, "loss 5 %"),
    false_alarms(RELAY, "relay"),
    false_alarms(CALM, "stalls", stalls=True),
    false_alarms(RELAY, "stalls + relay", stalls=True),
    crash,
    restart,
    isolation,
    name,
]

# The page's figures by size; what it does not give is not compared.
PAGE: dict[str, dict[int, float]] = {
    "packets/s/node": {4: 2.4},
    "loss 5 %: suspected": {4: 0, 12: 2.2},
    "loss 5 %: buried": {4: 0, 12: 0},
    "relay: suspected": {3: 1.2, 4: 0, 12: 0, 20: 0},
    "relay: buried": {3: 0, 4: 0, 12: 0, 20: 0},
    "stalls: suspected": {3: 36, 4: 78, 12: 1009},
    "stalls: buried": {3: 0.4, 4: 0.8, 12: 0, 20: 0},
    "stalls + relay: suspected": {4: 76},
    "stalls + relay: buried": {4: 1.0},
    "crash: first": {3: 11.9, 4: 11.9, 12: 12.6, 20: 15.5},
    "crash: all": {3: 12.0, 4: 12.1, 12: 12.9, 20: 15.8},
    "restart after 90 s: healed": {4: 0.4, 20: 0.9},
    "60 s isolation: healed": {3: 7.6, 4: 12.3, 20: 3.2},
    "name known everywhere": {4: 0.24, 12: 0.42, 20: 0.56},
}
ZERO_BOUND = 0.05  # what a mean may be where the page has zero


@dataclass(frozen=True)
class Mean:
    value: float
    bound: float  # 95 %, one side
    worst: float

    @classmethod
    def of(cls, values: list[float]) -> Mean:
        mean = sum(values) / len(values)
        if len(values) < 2:
            return cls(mean, math.nan, mean)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean, 1.96 * math.sqrt(variance / len(values)), max(values))


def verdict(label: str, n: int, mean: Mean) -> str:
    """Against the page's figure; one within the bound of it is no worse."""
    page = PAGE.get(label, {}).get(n)
    if page is None:
        return ""
    if page == 0:
        return "0" if mean.value <= ZERO_BOUND else "0, WORSE"
    if mean.value <= page:
        return f"{page:g}"
    return f"{page:g}, equal" if mean.value - mean.bound <= page else f"{page:g}, WORSE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each scenario (default 5)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0), to split a long run")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="cluster sizes (default 3 4 12 20)")
    parser.add_argument("--only", default="", help="only scenarios whose figures contain this text")
    arguments = parser.parse_args()
    print(f"{'figure':32s} {'n':>3s} {'mean':>9s} {'95 %':>8s} {'worst':>8s}  page", flush=True)
    started = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for scenario in SCENARIOS:
        if arguments.only and not any(arguments.only in label for label in scenario(3, 0)):
            continue
        for n in arguments.sizes:
            runs = [scenario(n, seed) for seed in seeds]
            for label in runs[0]:
                mean = Mean.of([run[label] for run in runs])
                row = f"{label:32s} {n:3d} {mean.value:9.2f} {mean.bound:8.2f} {mean.worst:8.2f}"
                print(f"{row}  {verdict(label, n, mean)}", flush=True)
    print(f"{arguments.seeds} seeds, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
