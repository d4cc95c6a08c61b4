"""Stages on rented GPUs of vast.ai: machines for one run, from the first create to the last confirmation.

The journal and the reaper are there before the first create; everything that is made is in the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NoReturn

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.gathering import REACH_WITHIN_S
from ppsmoke.errors import DestroyFailed, SmokeError, StageError, printable
from ppsmoke.rent.account_view import AccountView
from ppsmoke.rent.berth import Berth
from ppsmoke.rent.create import Creator
from ppsmoke.rent.destroy import end_entry, end_run
from ppsmoke.rent.fleet import Endpoints, SpecOf, StageSpec
from ppsmoke.rent.inquest import Inquest
from ppsmoke.rent.ledger import Entry, Journal, LedgerError
from ppsmoke.rent.market import Market
from ppsmoke.rent.outcome import Ended
from ppsmoke.rent.pacer import SPACING_S, Route
from ppsmoke.rent.plan import MAX_REPLACEMENTS, Plan
from ppsmoke.rent.reap import leftover_line
from ppsmoke.rent.reaper import PERSIST_S, Reaper
from ppsmoke.rent.rentals import Rental
from ppsmoke.rent.shapes import Listing
from ppsmoke.rent.shipyard import Shipyard
from ppsmoke.rent.starting import lost
from ppsmoke.rent.terms import Terms
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import VastError
from ppsmoke.report.progress import Progress
from ppsmoke.waiting import Deadline, cancel_and_reap, running

NODE_START_S = 30.0  # until a node listens: Python on a host that may be busy
POLL_S = 5.0  # spec, section 6: between two looks while machines come up
WATCH_S = 10.0  # afterwards; a link that falls silent is seen sooner elsewhere
GONE_LOOKS = 2  # in a row, before a machine that was up counts as lost
DESTROY_S = 84.0  # for all of a run's machines, as far as their DELETEs' spacing lets it be enough
LAST_ONE_S = 24.0  # from the last DELETE's turn on: its answer, a refusal of it, and some looks
AFTERWARDS_S = 6.0  # what may be left to do once the account has shown that all is gone
LOGS_S = 15.0
LOG_LINES, SHOWN_LINES = 200, 6


def destroy_budget_s(num_stages: int) -> float:
    """What a run of so many stages gets for destroying, with the hosts that it may have replaced."""
    return max(DESTROY_S, (num_stages + MAX_REPLACEMENTS - 1) * SPACING_S[Route.DESTROY] + LAST_ONE_S) + AFTERWARDS_S


class VastFleet:
    """journal: this run's, with nothing in it; closed in the end. code: the zipapp to push, b"" for a baked image.
    lifetime_s: of each machine; the labels say when it is over."""

    listen_host = "0.0.0.0"  # bound to 127.0.0.1, no datagram would leave this machine
    reach_within_s = NODE_START_S + REACH_WITHIN_S  # an endpoint is known once its node is being started

    def __init__(
        self,
        api: VastApi,
        plan: Plan,
        terms: Terms,
        journal: Journal,
        *,
        account: str,
        lifetime_s: float,
        code: bytes,
        start_reaper: Callable[[Journal], Reaper],
        progress: Progress,
    ) -> None:
        self._api = api
        self._plan = plan
        self._terms = terms
        self._journal = journal
        self._account = account
        self._lifetime_s = lifetime_s
        self._code = code
        self._start_reaper = start_reaper
        self._progress = progress
        self._endpoints = Endpoints()
        self._inquest = Inquest(progress.say)
        self.destroy_budget_s = destroy_budget_s(len(plan.chosen))
        self._ending_s = self.destroy_budget_s - AFTERWARDS_S
        self._view = AccountView(api, say=progress.say, on_look=self._end_strays)
        self._rentals: list[Rental] = []
        self._present: dict[int, Rental] = {}  # by stage
        self._creator: Creator | None = None
        self._reaper: Reaper | None = None
        self._up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving_up: set[int] = set()  # instances that are being ended while the run goes on

    async def rent(self, num_stages: int, spec_of: SpecOf, deadline: Deadline) -> None:
        """See Fleet.rent."""
        self._reaper = self._start_reaper(self._journal)
        self._creator = Creator(
            self._api,
            self._journal,
            run_id=self._journal.run_id,
            account=self._account,
            expires_at=self._api.clock.wall() + self._lifetime_s,
            say=self._progress.say,
        )
        yard = Shipyard(
            api=self._api,
            creator=self._creator,
            market=Market(self._api, self._plan),
            terms=self._terms,
            download_bytes=self._plan.wanted.download_bytes,
            code=self._code,
            view=self._view,
            spec_of=spec_of,
            progress=self._progress,
            deadline=deadline,
            rented=self._rented,
            started=self._started,
            give_up=self._give_up,
            num_stages=num_stages,
        )
        looking = self._start(self._view.keep_looking(lambda: WATCH_S if self._up.is_set() else POLL_S), "look")
        berths = {self._start(Berth(stage, yard).bring_up(), f"berth {stage}") for stage in range(num_stages)}
        while berths:
            done, _ = await asyncio.wait({*berths, looking}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            berths -= done
        self._up.set()

    def endpoints(self) -> AsyncIterator[Endpoint]:
        return self._endpoints.each()

    async def watch(self) -> NoReturn:
        """See Fleet.watch. What a stale status may only pretend is said, and does not end the run."""
        async with running(self._inquest.watch(), name="ask after nodes without a link"):
            await self._watch_account()

    def link_changed(self, node_id: str, *, up: bool) -> None:
        """See Fleet.link_changed."""
        self._inquest.link_changed(node_id, up=up)

    def failing(self, error: SmokeError) -> None:
        """See Fleet.failing."""
        then = "; destroying what is rented" if self._rentals else ""
        self._progress.say(error.cause + then, stage=error.stage)

    async def _watch_account(self) -> NoReturn:
        await self._up.wait()
        gone = dict.fromkeys(self._present, 0)
        said = {stage: rental.shows() for stage, rental in self._present.items()}
        while True:
            if not await self._view.next_look():
                continue
            for stage, rental in self._present.items():
                row = self._view.of(rental.instance_id)
                rental.latest = row or rental.latest
                why = lost(row)
                gone[stage] = gone[stage] + 1 if why else 0
                if gone[stage] >= GONE_LOOKS:
                    rental.failure = why
                    raise StageError(why, stage=stage, hint="rent again; --min-reliability picks steadier hosts")
                if rental.shows() != said[stage]:
                    said[stage] = rental.shows()
                    self._progress.say(f"its instance now shows {said[stage]}", stage=stage)

    async def logs(self, stage: int | None) -> str:
        """See Fleet.logs: what the containers printed, asked of the API."""
        wanted = [rental for of, rental in sorted(self._present.items()) if stage in (None, of)]
        logs = await asyncio.gather(*map(self._log_of, wanted))
        for rental, log in zip(wanted, logs, strict=True):
            self._show_end(rental, log)
        return "\n".join(logs)

    async def destroy_all(self) -> None:
        """See Fleet.destroy_all. What is known is destroyed at once; a create under way is seen to its end meanwhile,
        and then its instance is known."""
        for task in self._tasks:
            task.cancel()
        outcome = await end_run(
            self._api,
            self._journal,
            account=self._account,
            within_s=self._ending_s,
            say=self._progress.say,
            on_ended=self._note,
            coming=lambda: any(not task.done() for task in self._tasks),
        )
        await cancel_and_reap(*self._tasks)
        for warning in outcome.warnings:
            self._progress.say(f"warning: {warning}")
        self._journal.close()
        if self._reaper is not None and outcome.leftovers:
            self._reaper.leave()  # it goes on, now that the journal's lock is free
        elif self._reaper is not None:
            self._reaper.dismiss()
        if outcome.leftovers:
            lines = [leftover_line(leftover) for leftover in outcome.leftovers]
            raise DestroyFailed(
                "; ".join(lines),
                phase="destroy",
                hint=f"a reaper process goes on trying for {PERSIST_S / 60:.0f} minutes",
            )

    def _start(self, coroutine, name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        task.set_name(name)
        self._tasks.add(task)
        return task

    def _started(self, endpoint: Endpoint, spec: StageSpec) -> None:
        self._inquest.started(endpoint, spec)
        self._endpoints.put(endpoint)

    def _rented(self, rental: Rental) -> None:
        self._rentals.append(rental)
        self._present[rental.stage] = rental
        self._tell()

    def _tell(self) -> None:
        """What `--json` and a second Ctrl-C show of it."""
        now = self._api.clock.wall()
        self._progress.record.rentals = [rental.to_json(now) for rental in self._rentals]

    def _note(self, ended: Ended) -> None:
        for rental in self._rentals:
            if rental.ending is None and rental.instance_id == ended.instance_id:
                rental.ending, rental.ended_at = ended.how, self._api.clock.wall()
        self._tell()

    def _give_up(self, rental: Rental) -> None:
        """Show the end of a failed host's log, then destroy it, while another takes its place."""
        self._giving_up.add(rental.instance_id)
        self._start(self._end_while_others_go_on(self._journal.entries[rental.label], rental), "give up a host")

    def _end_strays(self, listing: Listing) -> None:
        """End what a create has made that failed, or was unclear and is looked for no more: it belongs to no stage."""
        ids = {instance.label: instance.id for instance in listing.instances}
        for label in self._creator.strays if self._creator is not None else ():
            entry = self._journal.entries[label]
            if entry.instance_id is None and label in ids:
                try:
                    self._journal.created(label, ids[label], at=self._api.clock.wall(), why="appeared late")
                except LedgerError as error:
                    self._progress.say(error.cause, stage=entry.stage)  # remembered all the same
                entry = self._journal.entries[label]
            if entry.open and entry.instance_id is not None and entry.instance_id not in self._giving_up:
                self._progress.say(f"instance {entry.instance_id} belongs to no stage; ending it", stage=entry.stage)
                self._giving_up.add(entry.instance_id)
                self._start(self._end_while_others_go_on(entry, None), "end a stray instance")

    async def _end_while_others_go_on(self, entry: Entry, rental: Rental | None) -> None:
        if rental is not None:
            self._show_end(rental, await self._log_of(rental))
        outcome = await end_entry(
            self._api,
            self._journal,
            entry,
            account=self._account,
            within_s=self._ending_s,
            say=self._progress.say,
        )
        for ended in outcome.ended:
            self._note(ended)

    def _show_end(self, rental: Rental, log: str) -> None:
        for line in log.splitlines()[-SHOWN_LINES:]:
            self._progress.say(f"| {line[:300]}", stage=rental.stage)

    async def _log_of(self, rental: Rental) -> str:
        """What its container, or where there is none its host, has printed; and how the account shows it."""
        heading = f"instance {rental.instance_id} ({rental.shows()}):"
        asking = asyncio.ensure_future(
            self._api.logs(rental.instance_id, tail=LOG_LINES, daemon=not rental.ran, within_s=LOGS_S)
        )
        try:
            await asyncio.wait({asking}, timeout=LOGS_S)
            if not asking.done():
                return f"{heading} its log did not arrive"
            with suppress(VastError):
                return f"{heading}\n{printable(asking.result())}"
            return f"{heading} no log"
        except SmokeError as error:
            return f"{heading} no log: {error.cause}"
        finally:
            await cancel_and_reap(asking)
