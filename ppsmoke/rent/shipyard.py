"""What the machines of one run have in common while they are brought up, and how one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.errors import RentError
from ppsmoke.rent.account_view import AccountView
from ppsmoke.rent.create import Creator
from ppsmoke.rent.fleet import SpecOf, StageSpec
from ppsmoke.rent.market import Market
from ppsmoke.rent.plan import MAX_REPLACEMENTS
from ppsmoke.rent.rentals import Rental
from ppsmoke.rent.terms import Terms
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.report.progress import Progress
from ppsmoke.waiting import Deadline


class HostFailed(Exception):
    """This machine will not become a stage. phase: where it failed; another: may another machine?"""

    def __init__(self, why: str, *, phase: str, another: bool = True, hint: str = "", detail: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.phase = phase
        self.another = another
        self.hint = hint
        self.detail = detail

    def error(self, stage: int, more: str = "") -> RentError:
        """What ends the run, where no other machine is taken."""
        hint = self.hint or ("try again, or another --gpu or --region" if self.another else "check --image")
        return RentError(f"{self.why}{more}", phase=self.phase, stage=stage, hint=hint, detail=self.detail)


@dataclass(kw_only=True)
class Shipyard:
    """code: the zipapp that is pushed, b"" for a baked image. rented(rental): a new one exists. started(endpoint,
    spec): a stage's node is being started there. give_up(rental): show the end of its log and destroy it, while others
    go on."""

    api: VastApi
    creator: Creator
    market: Market
    terms: Terms
    download_bytes: int
    code: bytes
    view: AccountView
    spec_of: SpecOf
    progress: Progress
    deadline: Deadline
    rented: Callable[[Rental], None]
    started: Callable[[Endpoint, StageSpec], None]
    give_up: Callable[[Rental], None]
    replacements: int = MAX_REPLACEMENTS
    running: int = 0  # machines that have come up
    num_stages: int = 0

    def look_at(self, rental: Rental) -> None:
        """Take over what the latest look at the account showed of it, if that was anything."""
        rental.latest = self.view.of(rental.instance_id) or rental.latest
