"""Ending instances until the API says they are gone. One place for it: the run's end, the reaper and the next start.

Nothing here gives up before its deadline, and nothing counts as gone without a read that succeeded and found nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ppsmoke.rent.labels import Label
from ppsmoke.rent.ledger import Entry, Journal, LedgerError
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import AuthRefused, VastError

NEW_S = 60.0  # so long after a create the API may not show an instance that exists (facts, section 10, 10)
APPEARS_WITHIN_S = 40.0  # an instance whose create was unclear is in the list by then, if it exists
LOOK_EVERY_S = 5.0
LOOKS = 3  # at least, for a create that is not old
OLD_S = 600.0  # a create this long ago needs one look
READS_PER_DELETE = 4  # still there after so many reads: ask again
RETRY_S = 2.0  # between a refused or failed DELETE and the next, beyond the client's own backoff


@dataclass(frozen=True)
class Target:
    """An instance to end. `young`: made so recently that "no such instance" may only mean "not yet visible"."""

    instance_id: int
    label: str | None
    stage: int | None = None
    made_at: float | None = None  # seconds since 1970


@dataclass(frozen=True)
class Ended:
    """Confirmed gone. `how`: "destroyed" or "was gone"."""

    instance_id: int | None
    label: str | None
    how: str


@dataclass(frozen=True)
class Leftover:
    """Not confirmed gone: it may still cost money."""

    instance_id: int | None
    label: str | None
    why: str
    stage: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What an attempt to end things came to. `warnings` are for the log: what was not as it should be."""

    ended: tuple[Ended, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.ended + other.ended, self.leftovers + other.leftovers, self.warnings + other.warnings)


async def end_run(
    api: VastApi, journal: Journal, *, account: str, within_s: float, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """End what a journal owns: the ids it knows, what its unclear creates may have made, and whatever else carries one
    of its labels. Never raises for what the API does; what it could not confirm is in `leftovers`.

    An entry of another account than `account` is ended if it is found here, and left open if it is not."""
    return await _Ending(api, journal, account, api.clock.now() + within_s, say).run()


async def end_instances(
    api: VastApi, targets: Iterable[Target], *, within_s: float, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """End these instances, which no journal of ours owns (an expired label, or the user said so)."""
    ending = _Ending(api, None, "", api.clock.now() + within_s, say)
    return ending.sorted(await asyncio.gather(*(ending.end(target) for target in targets)))


async def end_entry(
    api: VastApi,
    journal: Journal,
    entry: Entry,
    *,
    account: str,
    within_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """End one instance of a journal whose run goes on: a host that is replaced."""
    ending = _Ending(api, journal, account, api.clock.now() + within_s, say)
    return ending.sorted([await ending.end(_target(entry))])


class _Ending:
    def __init__(
        self, api: VastApi, journal: Journal | None, account: str, until: float, say: Callable[[str], None]
    ) -> None:
        self._api = api
        self._clock = api.clock
        self._journal = journal
        self._account = account
        self._until = until
        self._say = say
        self._warnings: list[str] = []
        self._begun: set[int] = set()

    def sorted(self, results: Iterable[Ended | Leftover]) -> Outcome:
        results = list(results)
        return Outcome(
            tuple(result for result in results if isinstance(result, Ended)),
            tuple(result for result in results if isinstance(result, Leftover)),
            tuple(self._warnings),
        )

    async def run(self) -> Outcome:
        journal = self._journal
        assert journal is not None
        known = [_target(entry) for entry in journal.open_entries() if entry.instance_id is not None]
        unknown = [entry for entry in journal.open_entries() if entry.instance_id is None]
        self._begun.update(target.instance_id for target in known)
        *ends, swept = await asyncio.gather(*(self.end(target) for target in known), self._sweep(unknown))
        return self.sorted([*ends, *swept])

    async def end(self, target: Target) -> Ended | Leftover:
        """DELETE until it is accepted, read until it is gone, and again; until the deadline."""
        self._record(target, "destroying")
        accepted, reads, why = False, 0, "no time was left to try"
        while self._left() > 0:
            try:
                if reads % READS_PER_DELETE == 0:
                    took = await self._api.destroy(target.instance_id, within_s=self._left())
                    accepted = accepted or took
                    why = "the API took its DELETE, and it was still there when time ran out"
                reads += 1
                if await self._api.instance(target.instance_id, within_s=self._left()) is None:
                    if self._proves_gone(target, accepted=accepted):
                        how = "destroyed" if accepted else "was gone"
                        self._record(target, "gone", how)
                        self._say(f"instance {target.instance_id} {how}")
                        return Ended(target.instance_id, target.label, how)
                    why = "this account does not show it" if not self._mine(target) else "not yet visible"
                    reads = 0  # an instance too new to be seen: ask for its end again
                    if not self._mine(target):
                        break
            except AuthRefused as error:
                why = error.cause
                break
            except VastError as error:
                why, reads = error.cause, 0
            await self._clock.sleep(min(RETRY_S, max(0.0, self._left())))
        self._say(f"instance {target.instance_id} could not be confirmed as ended: {why}")
        return Leftover(target.instance_id, target.label, why, target.stage)

    def _proves_gone(self, target: Target, *, accepted: bool) -> bool:
        """Is a read that found nothing the proof? Yes after an accepted DELETE; else only for an instance of this
        account that is old enough to have been seen."""
        young = target.made_at is not None and self._clock.wall() - target.made_at < NEW_S
        return accepted or (not young and self._mine(target))

    def _mine(self, target: Target) -> bool:
        entry = self._journal.entries.get(target.label or "") if self._journal is not None else None
        return entry is None or entry.account == self._account

    async def _sweep(self, unknown: list[Entry]) -> list[Ended | Leftover]:
        """List the account until every unclear create is either found (and ended) or old enough to be nothing; once at
        least, for anything else that carries one of its labels."""
        results: list[Ended | Leftover] = []
        waiting, looks, failure = {entry.label: entry for entry in unknown}, 0, "no time was left to look"
        while self._left() > 0:
            try:
                found = await self._new_of_this_run()
            except VastError as error:
                failure = f"could not list the account: {error.cause}"
                if isinstance(error, AuthRefused):
                    break
            else:
                looks += 1
                for label in [target.label for target in found]:
                    waiting.pop(label or "", None)
                results += await asyncio.gather(*(self.end(target) for target in found))
                for entry in [entry for entry in waiting.values() if self._never_was(entry, looks)]:
                    del waiting[entry.label]
                    self._record(entry, "gone", "never appeared")
                    results.append(Ended(None, entry.label, "never appeared"))
                failure = "its create was unclear; it has not appeared, and it is too early to say that it never will"
                strangers = [entry for entry in waiting.values() if entry.account != self._account]
                if not waiting or len(strangers) == len(waiting):
                    failure = "this account does not show it"
                    break
            await self._clock.sleep(min(LOOK_EVERY_S, max(0.0, self._left())))
        if not looks:
            self._warnings.append(failure)
        return results + [Leftover(None, label, failure, entry.stage) for label, entry in waiting.items()]

    async def _new_of_this_run(self) -> list[Target]:
        """What the account holds of this run and nobody here has begun to end; written down as created."""
        journal = self._journal
        assert journal is not None
        found = []
        for instance in (await self._api.instances(within_s=self._left())).instances:
            label = Label.parse(instance.label)
            if label is None or not journal.owns(label) or instance.id in self._begun:
                continue
            self._begun.add(instance.id)
            entry = journal.entries.get(str(label))
            if entry is None or entry.instance_id is None or not entry.open:
                self._record(Target(instance.id, str(label)), "created", "found by its label")
            else:
                self._warnings.append(f"a second instance, {instance.id}, carries the label {label}")
            found.append(Target(instance.id, str(label), label.stage, self._clock.wall()))
        return found

    def _never_was(self, entry: Entry, looks: int) -> bool:
        age_s = max(0.0, self._clock.wall() - entry.intent_at)
        if entry.account != self._account:
            return False
        return age_s >= OLD_S or (looks >= LOOKS and age_s >= APPEARS_WITHIN_S)

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

    def _left(self) -> float:
        return self._until - self._clock.now()


def _target(entry: Entry) -> Target:
    assert entry.instance_id is not None
    return Target(entry.instance_id, entry.label, entry.stage, entry.created_at)
