"""From the market to a plan: one search with all needs, as a rule; a broad one where somebody asks what they keep out.

Two searches of one account must be 6.5 s apart, so each further one has to be worth that.
"""

from __future__ import annotations

from ppsmoke.errors import RentError
from ppsmoke.rent.offers import Wanted
from ppsmoke.rent.plan import Plan, is_settled, make_plan
from ppsmoke.rent.shapes import Offer
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import VastError


async def find_plan(api: VastApi, wanted: Wanted, *, stages: int, thorough: bool = False) -> Plan:
    """The plan for the market of now. A reply holds 64 offers, the cheapest by the hour; the next 64 are asked for only
    where they could change the plan. thorough (`--dry-run`): search broadly too, so that the filters' counts tell
    something; done anyway when there are too few machines. Raises RentError, with the counts in its detail."""

    def enough(offers: list[Offer]) -> bool:
        return is_settled(offers, wanted, stages=stages)

    offers = await api.search(wanted.search_filters(), enough=enough)
    if not thorough:
        try:
            return make_plan(offers, wanted, stages=stages)
        except RentError as error:
            too_few = error
    try:
        known = {offer.id for offer in offers}
        offers += [offer for offer in await api.search(wanted.broad_filters(), max_pages=1) if offer.id not in known]
    except VastError:
        if not thorough:
            raise too_few from None  # the reason counts more than its breakdown
    return make_plan(offers, wanted, stages=stages)
