"""Ending instances until the API says they are gone. One place for it: the run's end, the reaper and the next start."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ppsmoke.rent.ending import Ending, target_of, to_nobody
from ppsmoke.rent.ledger import Entry, Journal
from ppsmoke.rent.outcome import Ended, Outcome, Target
from ppsmoke.rent.vast_api import VastApi


async def end_run(
    api: VastApi,
    journal: Journal,
    *,
    account: str,
    within_s: float,
    say: Callable[[str], None] = to_nobody,
    on_ended: Callable[[Ended], None] = to_nobody,
    coming: Callable[[], bool] = lambda: False,
) -> Outcome:
    """End what a journal owns: the ids it knows, what its unclear creates may have made, and whatever else carries one
    of its labels. Never raises for what the API does; what it could not confirm is in `leftovers`. A journal without a
    single create costs no call.

    coming(): may creates still be under way? What they make is ended too. on_ended is told of each one that is gone. An
    entry of another account than `account` is ended if it is found here, and left open if it is not."""
    if not journal.entries and not journal.damaged and not coming():
        return Outcome()
    ending = Ending(api, journal, account, within_s, say, on_ended)
    return await ending.run(sweep=True, coming=coming)


async def end_instances(
    api: VastApi, targets: Iterable[Target], *, within_s: float, say: Callable[[str], None] = to_nobody
) -> Outcome:
    """End these instances, which no journal of ours owns (an expired label, or the user said so)."""
    ending = Ending(api, None, "", within_s, say)
    ending.take_in(targets)
    return await ending.run()


async def end_entry(
    api: VastApi,
    journal: Journal,
    entry: Entry,
    *,
    account: str,
    within_s: float,
    say: Callable[[str], None] = to_nobody,
) -> Outcome:
    """End one instance of a journal whose run goes on: a host that is replaced."""
    ending = Ending(api, journal, account, within_s, say)
    ending.take_in([target_of(entry)])
    return await ending.run()
