"""What goes wrong in a soak, and when: a closed list of faults, drawn from a seed. Pure.

Faults come one at a time or two at once, with calm between them that is long enough for every request in it to count
as one of the calm; the first and the last stretch are calm.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["part", "unplug", "weather", "freeze", "kill", "no-udp", "relay-down", "router-restart"]

# The shortest and the longest of each, in seconds. A link is down after 15 s of silence and a peer lost 15 s later, and
# some cuts last longer than that. Hosts that load a model freeze for 3 to 12 s (facts/network.md, section 5).
LASTS_S: dict[Kind, tuple[float, float]] = {
    "part": (3.0, 40.0),  # nothing passes between two sites
    "unplug": (2.0, 40.0),  # nothing passes a site's cable
    "weather": (8.0, 25.0),  # loss, delay, jitter, reordering and doubling on a site's cable
    "freeze": (3.0, 12.0),  # SIGSTOP to a node's process
    "kill": (1.0, 4.0),  # SIGKILL, and started again after this; the fault lasts until it is ready again
    "no-udp": (12.0, 25.0),  # a site's router drops UDP
    "relay-down": (5.0, 20.0),  # the relay's process is killed, and started again after this
    "router-restart": (0.0, 0.0),  # a site's router forgets its connections
}
WAKE_S = 10.0  # a redial waits 8 s at most; a request that began earlier after a fault is not one of the calm
CALM_S = (14.0, 24.0)  # from the end of one fault to the beginning of the next, WAKE_S of it included
TWO_AT_ONCE = 0.5  # share of the faults that are joined by another


@dataclass(frozen=True)
class Fault:
    kind: Kind
    at_s: float
    lasts_s: float
    hosts: tuple[str, ...]  # whom it hits
    conditions: dict[str, float] = field(default_factory=dict)  # of a cable: nat_lab.cable.Conditions

    def __str__(self) -> str:
        more = "".join(f", {name} {value:g}" for name, value in self.conditions.items())
        return f"{self.kind} {' and '.join(self.hosts)}{more}, {self.lasts_s:.1f} s"


def plan(*, seed: int, seconds: float, home: str, relay: str, stages: Sequence[str]) -> list[Fault]:
    """The faults of a soak of so many seconds, in order. Each kind once before any comes twice."""
    draw = random.Random(f"soak {seed}")
    shrink = min(1.0, seconds / 120)  # a soak of a few seconds has short faults and short calms
    faults: list[Fault] = []
    deck: list[Kind] = []
    at_s = draw.uniform(*CALM_S) * shrink
    while True:
        together, ends_s = [], at_s
        for _ in range(2 if draw.random() < TWO_AT_ONCE else 1):
            deck = deck or draw.sample(list(LASTS_S), len(LASTS_S))
            kind = deck.pop()
            starts_s = draw.uniform(at_s, ends_s)
            fault = _fault(kind, starts_s, shrink, draw, home, relay, stages)
            together.append(fault)
            ends_s = max(ends_s, starts_s + fault.lasts_s)
        if ends_s + CALM_S[0] * shrink > seconds:
            return sorted(faults, key=lambda fault: fault.at_s)
        faults += together
        at_s = ends_s + draw.uniform(*CALM_S) * shrink


def _fault(
    kind: Kind, at_s: float, shrink: float, draw: random.Random, home: str, relay: str, stages: Sequence[str]
) -> Fault:
    least_s, most_s = LASTS_S[kind]
    lasts_s = draw.uniform(least_s, most_s) * shrink
    everybody = [home, relay, *stages]
    hosts: tuple[str, ...] = (draw.choice(everybody),)
    conditions: dict[str, float] = {}
    match kind:
        case "part":
            hosts = tuple(draw.sample(everybody, 2))
        case "weather":
            conditions = {
                "loss": round(draw.uniform(0.01, 0.15), 3),
                "delay_ms": float(draw.randrange(20, 200)),
                "jitter_ms": float(draw.randrange(0, 60)),
                "reorder": round(draw.uniform(0.0, 0.1), 3),
                "duplicate": round(draw.uniform(0.0, 0.05), 3),
            }
        case "kill":
            hosts = (draw.choice(stages),)
        case "relay-down":
            hosts = (relay,)
    return Fault(kind, at_s, lasts_s, hosts, conditions)
