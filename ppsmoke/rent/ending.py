"""The work of destroy.py: DELETEs that wait for their turns, and looks at the account until nothing is left.

Every instance's DELETE waits for its turn while one list call after the other shows them all, so that many end in
little more time than their DELETEs' spacing takes. Nothing here gives up before its deadline, and nothing counts as
gone without a read that succeeded and found nothing. A complete list of one page is that, once the API has taken the
DELETE or said that there is nothing to delete. Else it takes the instance's own body, too: rows that vanish between two
pages can hide one that stays, and a list may lag behind a create.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ppsmoke.rent.labels import Label
from ppsmoke.rent.ledger import Entry, Journal, LedgerError
from ppsmoke.rent.outcome import Ended, Leftover, Outcome, Target
from ppsmoke.rent.shapes import Listing
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import AuthRefused, NoTurn, VastError
from ppsmoke.waiting import cancel_and_reap

NEW_S = 60.0  # so long after a create the API may not show an instance that exists (facts, section 10, 10)
APPEARS_WITHIN_S = 40.0  # an instance whose create was unclear is in the list by then, if it exists
CONFIRM_EVERY_S = 2.0  # between two looks while the API is ending something
LOOK_EVERY_S = 5.0  # while it has taken no DELETE, or nothing is known but a create that was unclear
LOOKS = 3  # at least, for a create that is not old
OLD_S = 600.0  # a create this long ago needs one look
PAGE_S = 6.0  # for a page of the account's list; then instances are read singly, until lists come again
AGAIN_S = 10.0  # still there so long after its DELETE was answered: ask again
READ_S = 10.0  # for an instance by itself
LAST_CALL_S = 1.0  # no look is begun with less left than this; by then, other calls have failed and said why
SWEEP_S = 20.0  # with nothing left that is known: so long a list may fail that would show what nobody knows of
TELL_EVERY_S, TOLD_AT_ONCE = 10.0, 4  # what is not yet confirmed is said so often, so many of it in words


def to_nobody(_: object) -> None:
    pass


@dataclass
class _Case:
    """One instance that is being ended. Times of the client's clock."""

    target: Target
    asking: asyncio.Task[None] | None = None  # its DELETE, on its way or the latest
    reading: asyncio.Task[None] | None = None  # the same of a read of it alone
    answered_at: float | None = None  # the latest DELETE, whatever came back
    accepted_at: float | None = None  # the first DELETE that the API took
    denied: bool = False  # the latest one: the API knows no such instance
    why: str = "not tried yet"  # it counts as left over, should this be the end
    hopeless: bool = False

    @property
    def busy(self) -> bool:
        """Is its DELETE on its way?"""
        return self.asking is not None and not self.asking.done()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for task in (self.asking, self.reading) if task is not None]


class Ending:
    """journal: None where no journal owns them. on_ended is told of each instance that is gone."""

    def __init__(
        self,
        api: VastApi,
        journal: Journal | None,
        account: str,
        within_s: float,
        say: Callable[[str], None],
        on_ended: Callable[[Ended], None] = to_nobody,
    ) -> None:
        self._api = api
        self._clock = api.clock
        self._journal = journal
        self._account = account
        self._until = api.clock.now() + within_s
        self._say = say
        self._on_ended = on_ended
        self._cases: dict[int, _Case] = {}
        self._gone: set[int] = set()
        self._ended: list[Ended] = []
        self._warnings: list[str] = []
        self._looks = 0  # that succeeded
        self._refused = False  # the latest look: the key may not list
        self._seen = "no time was left to look"  # of unclear creates
        self._told_at = self._open_at = api.clock.now()  # _open_at: when something was last known to be open

    def take_in(self, targets: Iterable[Target]) -> None:
        """These are to be ended too."""
        for target in targets:
            if target.instance_id in self._gone:  # a create's reply that came after its instance's end
                self._record(target, "gone", "destroyed")
            elif target.instance_id not in self._cases:
                self._cases[target.instance_id] = _Case(target)
                self._record(target, "destroying")

    async def run(self, *, sweep: bool = False, coming: Callable[[], bool] = lambda: False) -> Outcome:
        """Until all is gone, hopeless, or the time is over. sweep: also what the journal gets to know meanwhile."""
        try:
            while self._left() > LAST_CALL_S:
                still_coming = coming()  # before the journal is read: what comes later is read in the next round
                if sweep:
                    self.take_in(target_of(entry) for entry in self._open() if entry.instance_id is not None)
                self._ask()
                await self._look(sweep=sweep, coming=still_coming)
                busy = any(case.busy or not case.hopeless for case in self._cases.values())
                again = sweep and self._must_look_again()
                if not busy and not still_coming and not again:
                    break
                self._tell()
                to_confirm = still_coming or any(case.accepted_at is not None for case in self._cases.values())
                pause_s = CONFIRM_EVERY_S if to_confirm else LOOK_EVERY_S
                await self._clock.sleep(min(pause_s, max(0.0, self._left())))
        finally:
            await cancel_and_reap(*(task for case in self._cases.values() for task in case.tasks))
        return self._outcome(sweep=sweep)

    def _ask(self) -> None:
        """Send a DELETE on its way for each that needs one; the client gives out the turns."""
        for case in self._cases.values():
            answered_at = case.answered_at
            due = answered_at is None or self._clock.now() - answered_at >= AGAIN_S
            if due and not case.busy and not case.hopeless:
                case.asking = asyncio.ensure_future(self._delete(case))

    async def _delete(self, case: _Case) -> None:
        try:
            took = await self._api.destroy(case.target.instance_id, within_s=self._left() - LAST_CALL_S)
        except AuthRefused as error:
            case.why, case.hopeless = error.cause, True
        except NoTurn:
            pass  # what was seen before says more
        except VastError as error:
            case.why = error.cause
        else:
            case.denied = not took
            if took:
                case.why = "the API took its DELETE, and it was still there when time ran out"
                case.accepted_at = case.accepted_at or self._clock.now()
            elif case.accepted_at is None:
                case.why = "the API knows no such instance, which is too early to believe"
        case.answered_at = self._clock.now()

    async def _look(self, *, sweep: bool, coming: bool) -> None:
        """One look at the account for all of them; what it alone does not prove is read singly."""
        began = self._clock.now()
        try:
            listing = await self._api.instances(within_s=self._left(), page_s=PAGE_S)
        except VastError as error:
            self._refused = isinstance(error, AuthRefused)
            if not isinstance(error, NoTurn):
                self._seen = f"could not list the account: {error.cause}"
            doubtful = [case for case in self._cases.values() if case.answered_at is not None]
        else:
            self._looks += 1
            self._refused = False
            self._seen = "its create was unclear; it has not appeared, and it is too early to say that it never will"
            doubtful = self._conclude(listing, began)
            if sweep:
                self._sort_the_unclear(listing, coming=coming)
        for case in sorted(doubtful, key=lambda case: case.answered_at or 0.0):
            if case.reading is None or case.reading.done():
                case.reading = asyncio.ensure_future(self._read(case))

    def _conclude(self, listing: Listing, began: float) -> list[_Case]:
        """Take what is gone off the cases; those that the list does not show and that it proves nothing of."""
        shown, doubtful = {instance.id for instance in listing.instances}, []
        for case in [case for case in self._cases.values() if case.target.instance_id not in shown]:
            young, certain = self._young(case.target), case.accepted_at is not None or case.denied
            if not self._mine(case.target) and case.answered_at is not None and case.accepted_at is None:
                case.why, case.hopeless = _of_another(self._journal.entries[case.target.label]), True
            elif listing.pages == 1 and not young and certain and self._proves_gone(case, began):
                self._is_gone(case)
            elif case.answered_at is not None or not young:
                doubtful.append(case)
        return doubtful

    async def _read(self, case: _Case) -> None:
        """The instance's own body."""
        began = self._clock.now()
        try:
            within_s = min(READ_S, self._left() - LAST_CALL_S)
            found = await self._api.instance(case.target.instance_id, within_s=within_s)
        except AuthRefused as error:
            case.why, case.hopeless = error.cause, self._refused
        except NoTurn:
            pass  # what was seen before says more
        except VastError as error:
            case.why = error.cause
        else:
            if found is None and case.target.instance_id in self._cases and self._proves_gone(case, began):
                self._is_gone(case)

    def _proves_gone(self, case: _Case, began: float) -> bool:
        """Is a read since `began` that did not find it the proof? Yes after a DELETE that the API took; else only for
        an instance of this account that is old enough to have been seen."""
        if case.accepted_at is not None and began >= case.accepted_at:
            return True
        return not self._young(case.target) and self._mine(case.target)

    def _is_gone(self, case: _Case) -> None:
        target, how = case.target, "destroyed" if case.accepted_at is not None else "was gone"
        self._record(target, "gone", how)
        self._say(f"instance {target.instance_id} {how}")
        self._gone.add(target.instance_id)
        self._told_at = self._clock.now()
        for task in case.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        del self._cases[target.instance_id]
        self._end(Ended(target.instance_id, target.label, how))

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._on_ended(ended)

    def _sort_the_unclear(self, listing: Listing, *, coming: bool) -> None:
        """Take in what the account holds of this run and nobody has begun to end; rule out creates that were unclear
        and are old enough to be nothing."""
        self.take_in(self._new_of_this_run(listing))
        for entry in self._unclear():
            if not coming and self._never_was(entry, listing):
                self._record(entry, "gone", "never appeared")
                self._end(Ended(None, entry.label, "never appeared"))

    def _new_of_this_run(self, listing: Listing) -> list[Target]:
        """Written down as created."""
        journal = self._journal
        assert journal is not None
        found = []
        for instance in listing.instances:
            label = Label.parse(instance.label)
            if label is None or not journal.owns(label) or instance.id in self._cases or instance.id in self._gone:
                continue
            target = Target(instance.id, str(label), label.stage, self._clock.wall())
            entry = journal.entries.get(str(label))
            if entry is None or entry.instance_id is None or not entry.open:
                self._record(target, "created", "found by its label")
            elif entry.instance_id != instance.id:
                self._warnings.append(f"a second instance, {instance.id}, carries the label {label}")
            found.append(target)
        return found

    def _never_was(self, entry: Entry, listing: Listing) -> bool:
        age_s = max(0.0, self._clock.wall() - entry.intent_at)
        if entry.account != self._account:
            return False
        return (age_s >= OLD_S and listing.pages == 1) or (self._looks >= LOOKS and age_s >= APPEARS_WITHIN_S)

    def _must_look_again(self) -> bool:
        """For creates that were unclear; and once, for anything else that carries one of the labels."""
        unclear = self._unclear()
        if unclear or self._cases:
            self._open_at = self._clock.now()
        if self._refused:
            return False
        if self._looks and unclear and all(entry.account != self._account for entry in unclear):
            self._seen = _of_another(unclear[0])
            return False
        return bool(unclear) or (not self._looks and self._clock.now() - self._open_at < SWEEP_S)

    def _open(self) -> list[Entry]:
        return self._journal.open_entries() if self._journal is not None else []

    def _unclear(self) -> list[Entry]:
        return [entry for entry in self._open() if entry.instance_id is None]

    def _mine(self, target: Target) -> bool:
        entry = self._journal.entries.get(target.label or "") if self._journal is not None else None
        return entry is None or entry.account == self._account

    def _young(self, target: Target) -> bool:
        return target.made_at is not None and self._clock.wall() - target.made_at < NEW_S

    def _tell(self) -> None:
        if self._clock.now() - self._told_at < TELL_EVERY_S:
            return
        self._told_at = self._clock.now()
        waiting = [f"instance {number} ({case.why})" for number, case in self._cases.items()]
        waiting += [f"an unclear create of stage {entry.stage} ({self._seen})" for entry in self._unclear()]
        more = f"; and {len(waiting) - TOLD_AT_ONCE} more" if len(waiting) > TOLD_AT_ONCE else ""
        self._say("not yet confirmed as ended: " + ("; ".join(waiting[:TOLD_AT_ONCE]) or self._seen) + more)

    def _record(self, of: Target | Entry, state: str, why: str = "") -> None:
        """Write it down if there is a journal. A full disk keeps nobody from ending what is rented."""
        if self._journal is None or of.label is None:
            return
        at = self._clock.wall()
        entry = self._journal.entries.get(of.label)
        if state != "created" and isinstance(of, Target) and entry is not None and entry.instance_id != of.instance_id:
            return  # a second instance under one label: the entry speaks of the first
        try:
            match state:
                case "created" if isinstance(of, Target):
                    self._journal.created(of.label, of.instance_id, at=at, why=why)
                case "destroying":
                    self._journal.destroying(of.label, at=at)
                case "gone":
                    self._journal.gone(of.label, why, at=at)
        except LedgerError as error:
            self._warnings.append(error.cause)

    def _outcome(self, *, sweep: bool) -> Outcome:
        left = [
            Leftover(case.target.instance_id, case.target.label, case.why, case.target.stage)
            for case in self._cases.values()
        ]
        for leftover in left:
            self._say(f"instance {leftover.instance_id} could not be confirmed as ended: {leftover.why}")
        if sweep:
            left += [Leftover(None, entry.label, self._seen, entry.stage) for entry in self._unclear()]
            if not self._looks:
                self._warnings.append(self._seen)
        return Outcome(tuple(self._ended), tuple(left), tuple(self._warnings))

    def _left(self) -> float:
        return self._until - self._clock.now()


def target_of(entry: Entry) -> Target:
    """An entry whose instance is known, as something to end."""
    assert entry.instance_id is not None
    return Target(entry.instance_id, entry.label, entry.stage, entry.created_at)


def _of_another(entry: Entry) -> str:
    """What is said of an entry that only another account's key can close."""
    return f"this account does not show it: it is on the bill of {entry.account or 'another account'}, ask with its key"
