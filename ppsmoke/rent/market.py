"""The offers of one run: those of the plan first, then what a new search shows; none is tried twice."""

from __future__ import annotations

from collections.abc import Sequence

from ppsmoke.errors import RentError
from ppsmoke.rent.offers import Candidate, pick, rank_offers
from ppsmoke.rent.plan import Plan
from ppsmoke.rent.shapes import Offer
from ppsmoke.rent.vast_api import VastApi

MAX_LOST = 8  # offers that somebody else took first, or whose host refused, in a run


class Market:
    """Each stage holds one offer; whoever needs another gets one that is on no other stage's machine or host."""

    def __init__(self, api: VastApi, plan: Plan) -> None:
        self._api = api
        self._plan = plan
        self._candidates: Sequence[Candidate] = (*plan.chosen, *plan.runners_up)
        self._held = {stage: one.offer for stage, one in enumerate(plan.chosen)}
        self._planned = dict(enumerate(plan.chosen))
        self._tried = {one.offer.id for one in plan.chosen}
        self._failed_hosts: set[int] = set()
        self._lost = 0

    def failed(self, offer: Offer) -> None:
        """This machine let the run down."""
        self._failed_hosts.add(offer.machine_id)

    def lost(self, offer: Offer, why: str, *, stage: int) -> None:
        """This offer could not be had. Raises RentError when that happened too often."""
        self._lost += 1
        if self._lost >= MAX_LOST:
            raise RentError(
                f"{self._lost} offers could not be had, the last one ({offer.id}): {why}",
                phase="rent",
                stage=stage,
                hint="the market moves fast: try again, or another --gpu or --region",
            )

    async def take(self, stage: int, *, within_s: float | None = None) -> Candidate:
        """The offer to try for this stage. within_s: how long its start may take, where that is limited. Raises
        RentError where none is left, also after a new search."""
        found = self._planned.pop(stage, None) or self._pick(stage, within_s)
        if found is None:
            filters = self._plan.wanted.search_filters()
            offers = await self._api.search(filters, enough=lambda offers: not self._plan.allows_dearer(offers))
            self._candidates, _ = rank_offers(offers, self._plan.wanted, failed_hosts=self._failed_hosts)
            found = self._pick(stage, within_s)
        if found is None:
            cause = f"no other offer is left that costs no more ({len(self._candidates)} acceptable)"
            if within_s is not None:
                cause = f"no other host would be ready in the {within_s:.0f} s that are left"
            raise RentError(
                cause + (f"; {self._lost} offers could not be had" if self._lost else ""),
                phase="rent",
                stage=stage,
                hint="try again, with a larger --budget or --max-dph, or another --gpu or --region",
            )
        self._tried.add(found.offer.id)
        self._held[stage] = found.offer
        return found

    def _pick(self, stage: int, within_s: float | None) -> Candidate | None:
        fit = [
            one
            for one in self._candidates
            if self._plan.allows(one)
            and one.offer.machine_id not in self._failed_hosts
            and (within_s is None or one.start_s <= within_s)
        ]
        beside = [offer for other, offer in self._held.items() if other != stage]
        return pick(fit, beside, not_offers=self._tried)
