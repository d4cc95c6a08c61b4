"""The figures that our SWIM core must reach, and how a mean over seeds is judged against them. Pure.

The page has what the design was chosen by: an earlier, separate model of the same parameters, simulated once with five
seeds (n = 20: one seed).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, math.nan, mean)
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
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


@dataclass(frozen=True)
class Row:
    label: str
    n: int
    seeds: int
    mean: Mean

    @property
    def verdict(self) -> str:
        return verdict(self.label, self.n, self.mean)

    def __str__(self) -> str:
        mean = self.mean
        figures = f"{mean.value:9.2f} {mean.bound:8.2f} {mean.worst:8.2f}"
        return f"{self.label:32s} {self.n:3d} {self.seeds:5d} {figures}  {self.verdict}"


HEAD = f"{'figure':32s} {'n':>3s} {'seeds':>5s} {'mean':>9s} {'95 %':>8s} {'worst':>8s}  page"


def rows(figures: Iterable[tuple[int, int, dict[str, float]]]) -> list[Row]:
    """From (size, seed, figures by label): a row per label and size, in the page's order. A seed counts once."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for n, seed, values in figures:
        for label, value in values.items():
            found.setdefault((label, n), {})[seed] = value
    order = {label: place for place, label in enumerate(PAGE)}
    by_seed = sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    # In the order of seeds, not of arrival: a table is the same to the last digit however the work was split.
    return [Row(label, n, len(of), Mean.of([of[seed] for seed in sorted(of)])) for (label, n), of in by_seed]


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as lines, and what they come to."""
    yield HEAD
    yield from map(str, rows)
    compared = [row for row in rows if row.verdict]
    worse = [row for row in compared if row.verdict.endswith("WORSE")]
    yield f"{len(compared)} of {len(rows)} figures have a value on the page; {len(worse)} are worse"
    yield from (f"  worse: {row.label}, n = {row.n}: {row.mean.value:.2f}, not {row.verdict}" for row in worse)
