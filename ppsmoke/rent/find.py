"""From the market to a plan: a search with all needs, and a broad one where somebody asks what they keep out."""

from __future__ import annotations

from ppsmoke.errors import RentError
from ppsmoke.rent.offers import Wanted
from ppsmoke.rent.plan import Plan, make_plan
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import VastError


async def find_plan(api: VastApi, wanted: Wanted, *, stages: int, thorough: bool = False) -> Plan:
    """The plan for the market of now. thorough (`--dry-run`): search broadly too, so that the filters' counts tell
    something; done anyway when there are too few machines. Raises RentError, with the counts in its detail."""
    offers = await api.search(wanted.search_filters())
    if not thorough:
        try:
            return make_plan(offers, wanted, stages=stages)
        except RentError as error:
            too_few = error
    try:
        known = {offer.id for offer in offers}
        offers += [offer for offer in await api.search(wanted.broad_filters()) if offer.id not in known]
    except VastError:
        if not thorough:
            raise too_few from None  # the reason counts more than its breakdown
    return make_plan(offers, wanted, stages=stages)
