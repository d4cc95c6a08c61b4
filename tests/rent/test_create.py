"""One instance from one offer: an unclear outcome ends adopted, destroyed or open in the journal, never forgotten."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ppsmoke.errors import RentError
from ppsmoke.rent import vast_api
from ppsmoke.rent.create import Creator, Machine, Rented
from ppsmoke.rent.destroy import end_run
from ppsmoke.rent.labels import Label
from ppsmoke.rent.ledger import Journal, LedgerError
from ppsmoke.rent.verdicts import AuthRefused, OfferLost, Refused
from tests.lab.fake_vast import FakeVast
from tests.rent.vast_lab import client, run

MACHINE = Machine(
    image="python:3.12-slim", disk_gb=16, env={"STAGE": "0"}, ports=("7070/tcp", "7071/udp"),
    entrypoint="/bin/sh", args=("-c", "true"),
)  # fmt: skip


@pytest.fixture
def fake():
    with FakeVast() as service:
        yield service
        ledger = service.ledger()
        assert ledger["leaks"] == {} and ledger["decoys_touched"] == 0 and ledger["live"] == []


# The same run id as one of the fake's foreign instances has: an id that two runs share by chance gives no right to it.
RUN_ID = "77aa55cc"


class Bench:
    """A run's creator with its journal; `finish` ends all, as a run does."""

    def __init__(self, fake: FakeVast, folder) -> None:
        self.fake = fake
        self.api = client(fake)
        self.journal = Journal.start(folder, RUN_ID, at=fake.clock.now())
        self.said: list[str] = []
        self.creator = Creator(
            self.api, self.journal, run_id=RUN_ID, account="lab/1", expires_at=fake.clock.now() + 600,
            say=self.said.append,
        )  # fmt: skip

    async def create(self, index: int = 0):
        offer = next(one for one in await self.api.search({}, max_pages=1) if one.id == self.fake.offers[index].ask_id)
        return await self.creator.create(offer, lambda label: MACHINE, stage=0)

    async def finish(self):
        return await end_run(self.api, self.journal, account="lab/1", within_s=90.0)

    @property
    def creates(self) -> int:
        return sum("/asks/" in request.path for request in self.fake.requests)


def test_a_create_is_in_the_journal_before_it_leaves_and_after_it_came_back(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    before = []
    fake.on("create", "before", lambda request, _: before.append([one.state for one in bench.journal.entries.values()]))
    rented = run(bench.create())
    assert isinstance(rented, Rented) and before == [["intent"]] and not bench.creator.strays
    (entry,) = bench.journal.entries.values()
    assert entry.state == "created" and entry.instance_id == rented.instance_id and entry.account == "lab/1"
    assert Label.parse(entry.label) is not None and fake.instance(rented.instance_id).label == entry.label
    fake.clock.advance(60)
    assert set(run(bench.api.instance(rented.instance_id)).ports) == {"7070/tcp", "7071/udp"}
    outcome = run(bench.finish())
    assert [one.how for one in outcome.ended] == ["destroyed"] and not outcome.leftovers
    assert not bench.journal.open_entries()


@pytest.mark.parametrize("fault", ["reset-after", "502-after", "500-after", "empty-after", "null-after", "cut-after"])
def test_a_lost_reply_is_looked_up_by_its_label_and_adopted(fake, tmp_path, fault):
    bench = Bench(fake, tmp_path)
    fake.fault(f"create.{fault}")
    rented = run(bench.create())
    assert isinstance(rented, Rented) and bench.creates == 1
    assert [one["id"] for one in fake.ledger()["live"]] == [rented.instance_id]
    assert "unclear" in bench.said[0]
    run(bench.finish())


def test_a_list_that_lags_behind_a_lost_reply_is_asked_again(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    fake.fault("create.502-after")
    fake.fault("list.lag", 3)
    assert isinstance(run(bench.create()), Rented)
    run(bench.finish())


def test_a_list_that_fails_is_no_proof_that_nothing_was_made(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    fake.fault("create.reset-after")
    fake.fault("list.502", 5)
    assert isinstance(run(bench.create()), Rented)
    run(bench.finish())


@pytest.mark.parametrize("fault", ["reset", "502", "null"])
def test_an_unclear_create_that_made_nothing_frees_the_run_and_stays_open_until_its_end(fake, tmp_path, fault):
    bench = Bench(fake, tmp_path)
    fake.fault(f"create.{fault}")
    assert isinstance(run(bench.create()), OfferLost) and bench.creates == 1
    assert bench.creator.strays == {one.label for one in bench.journal.open_entries()}
    assert [entry.state for entry in bench.journal.open_entries()] == ["intent"]
    outcome = run(bench.finish())
    assert [one.how for one in outcome.ended] == ["never appeared"] and not bench.journal.open_entries()


def test_what_appears_after_the_look_up_gave_up_is_ended_with_the_run(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    fake.fault("create.502-after")
    fake.fault("list.lag", 12)  # longer than anybody looks
    assert isinstance(run(bench.create()), Rented | OfferLost)
    fake.clock.advance(60)
    fake.clear_fault("list.lag")
    run(bench.finish())


def test_an_error_that_made_an_instance_is_ended_with_the_run(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    fake.fault("create.error-with-contract")
    with pytest.raises(Refused):
        run(bench.create())
    assert len(fake.ledger()["live"]) == 1
    assert [one.how for one in run(bench.finish()).ended] == ["destroyed"]


@pytest.mark.parametrize(("fault", "error"), [
    ("insufficient-credit", Refused), ("spend-rate-limit", Refused), ("404-auth", AuthRefused), ("401", AuthRefused),
])  # fmt: skip
def test_what_no_offer_would_mend_ends_the_run(fake, tmp_path, fault, error):
    bench = Bench(fake, tmp_path)
    fake.fault(f"create.{fault}")
    with pytest.raises(error) as caught:
        run(bench.create())
    assert caught.value.stage == 0 and not bench.journal.open_entries()


def test_a_definite_429_is_the_one_refusal_that_is_sent_again(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    fake.fault("create.429", 2)
    began = fake.clock.now()
    assert isinstance(run(bench.create()), Rented) and bench.creates == 3
    assert fake.clock.now() - began >= 24.0
    assert [one.state for one in bench.journal.entries.values()] == ["refused", "refused", "created"]
    run(bench.finish())


def test_429s_without_end_are_given_up(fake, tmp_path):
    bench = Bench(fake, tmp_path)
    fake.fault("create.429", None)
    with pytest.raises(RentError, match="too frequent"):
        run(bench.create())
    assert not bench.journal.open_entries()


def test_a_disk_that_is_full_lets_no_create_leave(fake, tmp_path, monkeypatch):
    bench = Bench(fake, tmp_path)

    def full(record) -> None:
        raise LedgerError("no space left", phase="rent")

    monkeypatch.setattr(bench.journal, "_append", full)
    with pytest.raises(LedgerError):
        run(bench.create())
    assert bench.creates == 0


def test_a_disk_that_fills_up_while_a_create_is_out_still_ends_the_instance(fake, tmp_path, monkeypatch):
    bench = Bench(fake, tmp_path)

    def full(record) -> None:
        raise LedgerError("no space left", phase="rent")

    fake.on("create", "before", lambda request, _: monkeypatch.setattr(bench.journal, "_append", full))
    with pytest.raises(LedgerError):
        run(bench.create())
    outcome = run(bench.finish())
    assert [one.how for one in outcome.ended] == ["destroyed"] and "no space left" in outcome.warnings[0]


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_create_is_written_down_before_the_cancellation_passes_on(fake, tmp_path, times):
    bench = Bench(fake, tmp_path)
    arrived, go_on = threading.Event(), threading.Event()
    fake.on("create", "after", lambda request, _: (arrived.set(), go_on.wait(10)))

    async def interrupted() -> None:
        task = asyncio.ensure_future(bench.create())
        while not arrived.is_set():
            await asyncio.sleep(0.005)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        (entry,) = bench.journal.open_entries()
        assert entry.state == "created"
        await bench.finish()

    run(interrupted())


def test_a_create_that_waits_for_its_turn_can_be_cancelled_and_was_never_sent(fake, tmp_path):
    bench = Bench(fake, tmp_path)

    async def interrupted() -> None:
        await bench.api.create_turn()
        task = asyncio.ensure_future(bench.creator.create(object(), lambda label: MACHINE, stage=0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(interrupted())
    assert bench.creates == 0 and bench.journal.entries == {}


def test_a_create_without_a_reply_ends_at_its_deadline_and_is_looked_up(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(vast_api, "CREATE_EXCHANGE_S", 0.2)
    bench = Bench(fake, tmp_path)
    fake.fault("create.hang-after")
    # On a busy machine the fake may carry it out after we have looked: then it is the run's end that finds it.
    assert isinstance(run(bench.create()), Rented | OfferLost) and bench.creates == 1
    run(bench.finish())


def test_a_body_is_field_for_field_the_official_clients():
    """Captured from vastai 1.9.1: create instance ... --cancel-unavail --entrypoint /bin/sh --args -c ..."""
    assert MACHINE.to_body("run-1") == {
        "client_id": "me", "image": "python:3.12-slim",
        "env": {"STAGE": "0", "-p 7070:7070": "1", "-p 7071:7071/udp": "1"}, "price": None, "disk": 16.0,
        "label": "run-1", "extra": None, "onstart": "/bin/sh", "image_login": None, "python_utf8": False,
        "lang_utf8": False, "use_jupyter_lab": False, "jupyter_dir": None, "force": False, "cancel_unavail": True,
        "template_hash_id": None, "user": None, "runtype": "args", "args": ["-c", "true"],
    }  # fmt: skip


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"env": {"A": "x" * 257}}, "257 characters"), ({"args": ("-c", "x" * 4048)}, "start command"),
    ({"entrypoint": "cd /x && y"}, "one executable"), ({"entrypoint": ""}, "one executable"),
    ({"env": {"-p 7000-7002:7000-7002": "1"}}, "port mapping"), ({"env": {"-v /a:/b": "1"}}, "port mapping"),
    ({"env": {f"A{index}": "x" * 256 for index in range(130)}}, "environment"),
])  # fmt: skip
def test_what_the_service_would_cut_or_drop_is_refused_here(changes, complaint):
    machine = Machine(**{"image": "i", "disk_gb": 10, **changes})
    with pytest.raises(ValueError, match=complaint):
        machine.to_body("run-1")


def test_a_stages_secrets_do_not_show_in_a_repr():
    assert "hush" not in repr(Machine(image="i", disk_gb=10, env={"SECRET": "hush"}))
