"""What a run would rent and the most it can cost, before anything is rented: for `--dry-run` and the question y/N."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppsmoke.errors import RentError
from ppsmoke.rent.gpu_names import near_names
from ppsmoke.rent.offers import NEAR_MARGIN, Candidate, Removed, Wanted, choose, median_prices, rank_offers, same_place
from ppsmoke.rent.shapes import Offer

MAX_REPLACEMENTS = 2  # design, phase rent
RUNNERS_UP = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen offers, a stage each, those that would replace them, and why the others were not taken."""

    wanted: Wanted
    chosen: tuple[Candidate, ...]
    runners_up: tuple[Candidate, ...]
    removed: tuple[Removed, ...]
    offers_seen: int
    acceptable: int

    @property
    def dph(self) -> float:
        """$/h of all stages together."""
        return sum(one.offer.dph_total for one in self.chosen)

    @property
    def expected_usd(self) -> float:
        return sum(one.expected_usd for one in self.chosen)

    @property
    def dearest_usd(self) -> float:
        """The most that any offer of this plan costs over a lifetime; a replacement may cost as much and no more."""
        return max((one.most_usd for one in (*self.chosen, *self.runners_up)), default=0.0)

    @property
    def most_usd(self) -> float:
        """Every chosen machine for its whole lifetime, and MAX_REPLACEMENTS more at the dearest price."""
        return sum(one.most_usd for one in self.chosen) + MAX_REPLACEMENTS * self.dearest_usd

    @property
    def at_most(self) -> str:
        """most_usd in words, to the next whole cent: what is said is never exceeded, and is enough as --max-usd."""
        return f"${math.ceil(round(self.most_usd * 100, 6)) / 100:.2f}"

    def allows(self, candidate: Candidate) -> bool:
        """May this one replace a machine without the run costing more than was said?"""
        return candidate.most_usd <= self.dearest_usd

    def allows_dearer(self, offers: Sequence[Offer]) -> bool:
        """Could one that costs more an hour than any of these replace a machine?"""
        floor = max((offer.dph_total for offer in offers), default=0.0)
        return floor * self.wanted.lifetime_s / 3600 <= self.dearest_usd

    def check(self, *, max_usd: float, credit: float | None) -> None:
        """Raises RentError if the run could cost more than the limit, or than what the account holds."""
        if self.most_usd > max_usd:
            raise RentError(
                f"this run could cost {self.at_most}, and the limit is {_exact(max_usd)}; nothing was rented",
                phase="rent",
                hint="raise --max-usd, or lower --max-dph or --budget",
            )
        if credit is not None and credit < self.most_usd:
            raise RentError(
                f"the account holds {_exact(credit)}, and this run could cost {self.at_most}; nothing was rented",
                phase="rent",
                hint="add credit at https://cloud.vast.ai/billing/",
            )

    def to_json(self) -> dict[str, Any]:
        """The plan of `--dry-run --json`."""
        return {
            "chosen": [_row(one, stage) for stage, one in enumerate(self.chosen)],
            "runners_up": [_row(one) for one in self.runners_up],
            "offers_seen": self.offers_seen,
            "acceptable": self.acceptable,
            "removed": [{"filter": one.name, "offers": one.first, "alone": one.alone} for one in self.removed],
            "usd_per_h": round(self.dph, 6),
            "expected_usd": round(self.expected_usd, 6),
            "most_usd": round(self.most_usd, 6),
            "lifetime_s": self.wanted.lifetime_s,
            "max_replacements": MAX_REPLACEMENTS,
        }

    def to_lines(self) -> list[str]:
        """The plan as a person reads it."""
        lines = [f"stage {stage}: {_describe(one)}" for stage, one in enumerate(self.chosen)]
        lines.append(
            f"together ${self.dph:.3f} an hour; a usual run about ${self.expected_usd:.3f}; at most "
            f"{self.at_most} (each machine for {self.wanted.lifetime_s / 60:.0f} minutes, and "
            f"{MAX_REPLACEMENTS} replaced ones)"
        )
        lines += [f"else: {_describe(one)}" for one in self.runners_up]
        return [*lines, *removed_lines(self.removed, self.offers_seen, self.acceptable)]


def make_plan(offers: Sequence[Offer], wanted: Wanted, *, stages: int) -> Plan:
    """The plan for these offers. Raises RentError when there are fewer acceptable machines than stages; it says which
    filters stand in the way."""
    candidates, removed = rank_offers(offers, wanted)
    chosen = choose(candidates, stages)
    if len(chosen) < stages:
        lines = removed_lines(removed, len(offers), len(candidates))
        raise RentError(
            f"{len(chosen)} of {stages} machines found: {len(offers)} offers, {len(candidates)} acceptable",
            phase="rent",
            hint=_hint(offers, wanted, removed),
            detail="\n".join(lines),
        )
    taken = [one.offer for one in chosen]
    others = [one for one in candidates if not any(same_place(one.offer, offer) for offer in taken)]
    return Plan(
        wanted=wanted,
        chosen=tuple(chosen),
        runners_up=tuple(others[:RUNNERS_UP]),
        removed=tuple(removed),
        offers_seen=len(offers),
        acceptable=len(candidates),
    )


def is_settled(offers: Sequence[Offer], wanted: Wanted, *, stages: int) -> bool:
    """Is the plan for these, the cheapest offers by the hour, the one to take, whatever dearer ones there are? So it is
    if a machine that costs as much as the dearest of them, and nothing for its downloads, would change nothing; and if
    each model in it was offered often enough to know what is usual for it."""
    try:
        plan = make_plan(offers, wanted, stages=stages)
    except RentError:
        return False
    floor_usd = max(offer.dph_total for offer in offers) * wanted.expected_s / 3600
    taken = (*plan.chosen, *plan.runners_up)
    return (
        len(plan.runners_up) == RUNNERS_UP
        and {one.offer.gpu_name for one in taken} <= median_prices(offers).keys()
        and not any(one.bad_signs for one in taken)  # those without any would come before them
        and all(one.expected_usd < floor_usd for one in taken)
        # A nearer one may cost a little more than the cheapest; here none of them could.
        and max(one.expected_usd for one in plan.chosen) * (1 + NEAR_MARGIN) < floor_usd
    )


def removed_lines(removed: Sequence[Removed], seen: int, acceptable: int) -> list[str]:
    """How many offers each filter removed, on one line each."""
    lines = [f"{seen} offers seen, {acceptable} acceptable"]
    for one in removed:
        only = f", {one.alone} by this alone" if one.alone else ""
        lines.append(f"  {one.name}: {one.first} removed{only}")
    return lines


_OPTIONS = {
    "gpu": "--gpu",
    "disk": "--disk",
    "reliability": "--min-reliability",
    "price": "--max-dph",
    "region": "--region",
    "start in time": "--budget",
}


def _hint(offers: Sequence[Offer], wanted: Wanted, removed: Sequence[Removed]) -> str:
    """What to relax: a misspelt GPU first, else the option that alone kept the most offers out."""
    if wanted.gpu_name and not any(offer.gpu_name.casefold() == wanted.gpu_name.casefold() for offer in offers):
        near = near_names(wanted.gpu_name, {offer.gpu_name for offer in offers})
        if near:
            return f"no offer of a {wanted.gpu_name!r}; did you mean {' or '.join(near)}?"
    ours = sorted((one for one in removed if one.alone and one.name in _OPTIONS), key=lambda one: -one.alone)
    if ours:
        return f"{_OPTIONS[ours[0].name]} alone keeps {ours[0].alone} more out"
    options = "--max-dph" if not (wanted.gpu_name or wanted.regions) else "--max-dph, --gpu or --region"
    return f"relax {options}, or try again later"


def _describe(one: Candidate) -> str:
    offer = one.offer
    text = (
        f"{offer.gpu_name} {offer.gpu_ram_mb / 1000:.0f} GB in {offer.place or 'an unknown place'}, "
        f"${offer.dph_total:.3f} an hour, {offer.inet_down_mbps:.0f} Mb/s, ready in about {one.start_s:.0f} s "
        f"(offer {offer.id}, machine {offer.machine_id}, host {offer.host_id or '?'})"
    )
    return text + "".join(f"; beware: {sign}" for sign in one.bad_signs)


def _row(one: Candidate, stage: int | None = None) -> dict[str, Any]:
    offer = one.offer
    row = {
        "offer_id": offer.id,
        "machine_id": offer.machine_id,
        "host_id": offer.host_id,
        "gpu": offer.gpu_name,
        "gpu_ram_mb": offer.gpu_ram_mb,
        "place": offer.place,
        "usd_per_h": offer.dph_total,
        "inet_down_mbps": offer.inet_down_mbps,
        "inet_down_usd_per_gb": offer.inet_down_usd_per_gb,
        "reliability": offer.reliability,
        "expected_usd": round(one.expected_usd, 6),
        "most_usd": round(one.most_usd, 6),
        "start_s": round(one.start_s, 1),
        "bad_signs": list(one.bad_signs),
    }
    return row if stage is None else {"stage": stage, **row}


def _exact(usd: float) -> str:
    """Dollars and cents, and their fractions where there are any."""
    return f"${usd:.2f}" if math.isclose(usd, round(usd, 2)) else f"${usd:.4f}"
