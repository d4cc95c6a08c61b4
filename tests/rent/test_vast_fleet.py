"""The fleet without containers, in the fake's time: what it does about instances that belong to no stage, and says."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ppsmoke import smoke
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.errors import StageError
from ppsmoke.rent.find import find_plan
from ppsmoke.rent.ledger import Journal
from ppsmoke.rent.offers import Wanted
from ppsmoke.rent.terms import Terms
from ppsmoke.rent.vast_fleet import VastFleet
from ppsmoke.report.progress import Progress
from ppsmoke.report.summary import RunRecord
from ppsmoke.settings import Settings
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.fake_vast import FakeVast
from tests.rent.vast_lab import client, run

PATIENCE_S = 30.0  # how long a test waits for what must come; the machine may be busy
SETTINGS = Settings(run_id="5eed0001", lifetime_s=420.0)
WANTED = Wanted(download_bytes=100_000_000, lifetime_s=420.0)


class _Reaper:
    def dismiss(self) -> None:
        pass

    leave = dismiss


class Bench:
    """A fleet of two stages, whose containers never run, and what it has said."""

    @classmethod
    async def open(cls, fake: FakeVast, folder) -> Bench:
        self = cls()
        api = client(fake)
        self.stream = io.StringIO()
        self.journal = Journal.start(folder, SETTINGS.run_id, at=fake.clock.now())
        self.record = RunRecord(SETTINGS.run_id, "m", 2)
        self.fleet = VastFleet(
            api,
            await find_plan(api, WANTED, stages=2),
            Terms(),
            self.journal,
            account=await api.account(),
            lifetime_s=420.0,
            code=b"",
            start_reaper=lambda journal: _Reaper(),
            progress=Progress(self.record, stream=self.stream),
        )
        specs = smoke.specs(SETTINGS, "m", RunAuthority(SETTINGS.run_key), SimpleNamespace(node_id="0" * 16))
        self.renting = asyncio.ensure_future(self.fleet.rent(2, specs, Deadline.after(60.0)))
        return self

    async def until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, self.stream.getvalue()
            assert not self.renting.done() or self.renting.exception() is None, self.renting.exception()
            await asyncio.sleep(0.005)

    def said(self, words: str) -> bool:
        return re.search(words, self.stream.getvalue()) is not None

    async def end(self) -> None:
        await cancel_and_reap(self.renting)
        await self.fleet.destroy_all()


@pytest.fixture
def fake():
    with FakeVast(enforce_limits=True) as service:
        yield service
        ledger = service.ledger()
        assert ledger["live"] == [] and ledger["decoys_touched"] == 0 and ledger["leaks"] == {}


def test_an_instance_that_appears_after_nobody_looked_for_it_any_more_is_ended_while_the_run_goes_on(fake, tmp_path):
    hidden: list[int] = []

    def hide(request, instance_id) -> None:
        if not hidden:
            hidden.append(instance_id)
            fake.instance(instance_id).invisible_reads = 16  # longer than an unclear create is looked up

    async def story() -> None:
        fake.on("create", "after", hide)
        fake.fault("create.502-after")
        bench = await Bench.open(fake, tmp_path)
        await bench.until(lambda: bench.said("belongs to no stage; ending it"))
        await bench.until(lambda: bench.said(f"instance {hidden[0]} destroyed"))
        assert bench.stream.getvalue().count("belongs to no stage") == 1 and not bench.renting.done()
        assert hidden[0] not in {line["id"] for line in fake.ledger()["live"]}
        await bench.end()
        assert not bench.journal.open_entries()

    run(story())


def test_a_host_that_hangs_is_said_to_hang_every_twenty_seconds(fake, tmp_path):
    async def story() -> None:
        fake.fault("machine.stuck-loading", None)
        bench = await Bench.open(fake, tmp_path)
        await bench.until(lambda: bench.said(r"stage 0: still loading: .*, \d\d s after its create"))
        await bench.end()

    run(story())


def test_a_failure_is_said_before_anything_is_destroyed_and_every_end_counts_as_it_comes(fake, tmp_path):
    async def story() -> None:
        bench = await Bench.open(fake, tmp_path)
        await bench.until(lambda: len(bench.record.rentals) == 2)
        bench.fleet.failing(StageError("its node was killed by SIGKILL", stage=1))
        assert bench.said("stage 1: its node was killed by SIGKILL; destroying what is rented")
        still_rented: list[int] = []
        fake.on("destroy", "before", lambda *_: still_rented.append(len(bench.record.still_rented())))
        await bench.end()
        assert still_rented[0] == 2 and bench.record.still_rented() == []

    run(story())


def test_an_instance_that_costs_more_than_its_offer_said_is_told_of_once(fake, tmp_path):
    def raise_price(request, instance_id) -> None:
        fake.instance(instance_id).offer.row["dph_base"] = 0.9

    async def story() -> None:
        fake.on("create", "after", raise_price)
        fake.fault("machine.stuck-loading", None)
        bench = await Bench.open(fake, tmp_path)
        await bench.until(lambda: bench.said("stage 0: still loading"))
        await bench.end()
        said = bench.stream.getvalue()
        offered = bench.record.rentals[0]["usd_per_h"]
        assert said.count(f"stage 0: warning: it costs $0.903 an hour, and its offer said ${offered:.3f}") == 1

    run(story())
