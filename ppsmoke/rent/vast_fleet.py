"""Stages on rented GPUs of vast.ai: machines for one run, from the first create to the last confirmation.

The journal and the reaper are there before the first create; everything that is made is in the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.gathering import REACH_WITHIN_S
from ppsmoke.errors import DestroyFailed, SmokeError, StageError, printable
from ppsmoke.rent.account_view import AccountView
from ppsmoke.rent.berth import Berth
from ppsmoke.rent.create import Creator
from ppsmoke.rent.destroy import Outcome, end_entry, end_run
from ppsmoke.rent.fleet import Endpoints, SpecOf
from ppsmoke.rent.ledger import Entry, Journal
from ppsmoke.rent.market import Market
from ppsmoke.rent.plan import Plan
from ppsmoke.rent.reap import leftover_line
from ppsmoke.rent.reaper import Reaper
from ppsmoke.rent.rentals import Rental
from ppsmoke.rent.shipyard import Shipyard
from ppsmoke.rent.starting import lost
from ppsmoke.rent.terms import Terms
from ppsmoke.rent.vast_api import CREATE_EXCHANGE_S, THREAD_GRACE_S, VastApi
from ppsmoke.rent.verdicts import VastError
from ppsmoke.report.progress import Progress
from ppsmoke.waiting import Deadline, cancel_and_reap

NODE_START_S = 30.0  # until a node listens: Python on a host that may be busy
POLL_S = 5.0  # spec, section 6: between two looks while machines come up
WATCH_S = 10.0  # afterwards; a link that falls silent is seen sooner elsewhere
GONE_LOOKS = 2  # in a row, before a machine that was up counts as lost
CREATE_ENDS_S = CREATE_EXCHANGE_S + 2 * THREAD_GRACE_S  # a create under way cannot be cut short
DESTROY_S = 84.0  # for all of it; the story allows a little more
LOGS_S = 15.0
LOG_LINES, SHOWN_LINES = 200, 6


class VastFleet:
    """code: the zipapp to push, b"" for a baked image. lifetime_s: of each machine; the labels say when it is over."""

    listen_host = "0.0.0.0"  # bound to 127.0.0.1, no datagram would leave this machine
    reach_within_s = NODE_START_S + REACH_WITHIN_S  # an endpoint is known once its node is being started

    def __init__(
        self,
        api: VastApi,
        plan: Plan,
        terms: Terms,
        *,
        run_id: str,
        account: str,
        folder: Path,
        lifetime_s: float,
        code: bytes,
        start_reaper: Callable[[Journal], Reaper],
        progress: Progress,
    ) -> None:
        self._api = api
        self._plan = plan
        self._terms = terms
        self._run_id = run_id
        self._account = account
        self._folder = folder
        self._lifetime_s = lifetime_s
        self._code = code
        self._start_reaper = start_reaper
        self._progress = progress
        self._endpoints = Endpoints()
        self._view = AccountView(api, say=progress.say)
        self._rentals: list[Rental] = []
        self._present: dict[int, Rental] = {}  # by stage
        self._journal: Journal | None = None
        self._reaper: Reaper | None = None
        self._up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving_up: set[int] = set()  # instances that are being ended while the run goes on

    async def rent(self, num_stages: int, spec_of: SpecOf, deadline: Deadline) -> None:
        """See Fleet.rent."""
        clock = self._api.clock
        self._journal = Journal.start(self._folder, self._run_id, at=clock.wall())
        self._reaper = self._start_reaper(self._journal)
        yard = Shipyard(
            api=self._api,
            creator=Creator(
                self._api,
                self._journal,
                run_id=self._run_id,
                account=self._account,
                expires_at=clock.wall() + self._lifetime_s,
                say=self._progress.say,
            ),
            market=Market(self._api, self._plan),
            terms=self._terms,
            download_bytes=self._plan.wanted.download_bytes,
            code=self._code,
            view=self._view,
            spec_of=spec_of,
            endpoints=self._endpoints,
            progress=self._progress,
            deadline=deadline,
            rented=self._rented,
            give_up=self._give_up,
            strays=self._end_strays,
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
        """See Fleet.destroy_all. A create under way is seen to its end first: then its instance is known."""
        began = self._api.clock.now()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CREATE_ENDS_S)
        if self._journal is None:
            return
        left_s = DESTROY_S - (self._api.clock.now() - began)
        outcome = await end_run(
            self._api, self._journal, account=self._account, within_s=left_s, say=self._progress.say
        )
        self._note(outcome)
        for warning in outcome.warnings:
            self._progress.say(f"warning: {warning}")
        self._journal.close()
        if self._reaper is not None and outcome.leftovers:
            self._reaper.leave()  # it goes on, now that the journal's lock is free
        elif self._reaper is not None:
            self._reaper.dismiss()
        if outcome.leftovers:
            lines = [leftover_line(leftover) for leftover in outcome.leftovers]
            raise DestroyFailed("; ".join(lines), phase="destroy", hint="a reaper process goes on trying for a while")

    def _start(self, coroutine, name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        task.set_name(name)
        self._tasks.add(task)
        return task

    def _rented(self, rental: Rental) -> None:
        self._rentals.append(rental)
        self._present[rental.stage] = rental
        self._tell()

    def _tell(self) -> None:
        """What `--json` and a second Ctrl-C show of it."""
        now = self._api.clock.wall()
        self._progress.record.rentals = [rental.to_json(now) for rental in self._rentals]

    def _note(self, outcome: Outcome) -> None:
        now = self._api.clock.wall()
        endings = {ended.instance_id: ended.how for ended in outcome.ended}
        for rental in self._rentals:
            if rental.ending is None and rental.instance_id in endings:
                rental.ending, rental.ended_at = endings[rental.instance_id], now
        self._tell()

    def _give_up(self, rental: Rental) -> None:
        """Show the end of a failed host's log, then destroy it, while another takes its place."""
        assert self._journal is not None
        self._giving_up.add(rental.instance_id)
        self._start(self._end_while_others_go_on(self._journal.entries[rental.label], rental), "give up a host")

    def _end_strays(self) -> None:
        """End what exists under our labels and is no stage's machine: a create that failed has made it."""
        assert self._journal is not None
        known = {rental.instance_id for rental in self._rentals} | self._giving_up | {None}
        for entry in self._journal.open_entries():
            if entry.instance_id not in known:
                self._giving_up.add(entry.instance_id)
                self._start(self._end_while_others_go_on(entry, None), "end a stray instance")

    async def _end_while_others_go_on(self, entry: Entry, rental: Rental | None) -> None:
        if rental is not None:
            self._show_end(rental, await self._log_of(rental))
        outcome = await end_entry(
            self._api, self._journal, entry, account=self._account, within_s=DESTROY_S, say=self._progress.say
        )
        self._note(outcome)

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
