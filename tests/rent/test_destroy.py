"""Ending things until they are seen gone, whatever the API does meanwhile."""

from __future__ import annotations

import pytest

from ppsmoke.rent.destroy import Target, end_instances, end_run
from ppsmoke.rent.labels import Label
from ppsmoke.rent.ledger import Entry, Journal
from tests.lab.fake_vast import FakeVast
from tests.rent.vast_lab import client, run

BODY = {"client_id": "me", "image": "python:3.12-slim", "disk": 10.0, "env": {}, "runtype": "args", "args": [],
        "price": None, "onstart": None, "cancel_unavail": True}  # fmt: skip


class Run:
    """A run with instances that exist, and the journal that says so."""

    def __init__(self, fake: FakeVast, folder, *, instances: int = 2, run_id: str = "5eed0001") -> None:
        self.fake, self.api = fake, client(fake)
        self.journal = Journal.start(folder, run_id, at=fake.clock.now())
        self.account = run(self.api.account())
        self.ids = [self.rent(stage) for stage in range(instances)]

    def rent(self, stage: int, *, written: str = "created") -> int:
        label = str(Label.fresh(self.journal.run_id, stage, expires_at=self.fake.clock.now() + 600))
        offer = next(one for one in self.fake.offers if not one.rented)
        now = self.fake.clock.now()
        self.journal.intent(Entry(label=label, state="intent", stage=stage, account=self.account, intent_at=now))
        self.fake.clock.advance(5)  # the documented interval
        created = run(self.api.create(offer.ask_id, {**BODY, "label": label}))
        if written == "created":
            self.journal.created(label, created.instance_id, at=now)
        return created.instance_id

    def end(self, within_s: float = 90.0):
        return run(end_run(self.api, self.journal, account=self.account, within_s=within_s))

    def check_empty(self) -> None:
        ledger = self.fake.ledger()
        assert ledger["live"] == [] and ledger["decoys_touched"] == 0 and ledger["leaks"] == {}
        assert not self.journal.open_entries()


@pytest.fixture
def fake():
    with FakeVast(enforce_limits=True) as service:
        yield service


@pytest.mark.parametrize("instances", [1, 2, 8])
def test_everything_is_destroyed_and_seen_gone_within_the_rate_limits(fake, tmp_path, instances):
    lab = Run(fake, tmp_path, instances=instances)
    outcome = lab.end()
    assert {one.instance_id for one in outcome.ended} == set(lab.ids) and not outcome.leftovers
    lab.check_empty()
    assert fake.ledger()["too_early"] == {}


@pytest.mark.parametrize(("fault", "times"), [
    ("destroy.429", 2), ("destroy.429-json", 1), ("destroy.502", 2), ("destroy.502-after", 1), ("destroy.reset", 2),
    ("destroy.reset-after", 1), ("destroy.null-after", 1), ("destroy.ignored", 1), ("destroy.slow", 1),
    ("destroy.gone-400", 1), ("destroy.500", 1), ("show.502", 3), ("show.429", 2), ("show.null", 2), ("show.reset", 2),
    ("show.html", 1), ("list.502", 2), ("list.lag", 1), ("list.cut-after", 1),
])  # fmt: skip
def test_a_fault_on_the_way_delays_the_end_and_does_not_prevent_it(fake, tmp_path, fault, times):
    lab = Run(fake, tmp_path)
    fake.fault(fault, times)
    outcome = lab.end()
    assert len(outcome.ended) == 2 and not outcome.leftovers
    lab.check_empty()


@pytest.mark.parametrize(("fault", "why"), [
    ("destroy.429", "429"), ("destroy.502", "502"), ("destroy.404-auth", "refused the key"), ("show.502", "502"),
    ("destroy.ignored", "still there"), ("show.404-auth", "refused the key"), ("destroy.redirect", "redirect"),
    ("show.null-after", "no JSON object"), ("destroy.403", "refused the key"),
])  # fmt: skip
def test_what_is_never_confirmed_is_left_over_with_its_reason(fake, tmp_path, fault, why):
    lab = Run(fake, tmp_path, instances=1)
    fake.fault(fault, None)
    outcome = lab.end(within_s=40.0)
    assert [(one.instance_id, one.stage) for one in outcome.leftovers] == [(lab.ids[0], 0)] and not outcome.ended
    assert why in outcome.leftovers[0].why
    assert lab.journal.open_entries()


def test_a_create_without_an_outcome_is_found_and_ended(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=1)
    lost = lab.rent(1, written="nothing")
    fake.clock.advance(5)
    outcome = lab.end()
    assert {one.instance_id for one in outcome.ended} == {lab.ids[0], lost}
    lab.check_empty()


def test_a_create_that_lags_is_waited_for(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=0)
    lab.rent(0, written="nothing")
    fake.fault("list.lag", 4)
    assert [one.how for one in lab.end().ended] == ["destroyed"]
    lab.check_empty()


def test_an_unclear_create_cannot_be_ruled_out_while_the_list_fails(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=0)
    lab.rent(0, written="nothing")
    fake.fault("list.502", None)
    outcome = lab.end(within_s=60.0)
    assert [one.instance_id for one in outcome.leftovers] == [None] and "list" in outcome.leftovers[0].why


def test_an_old_unclear_create_needs_one_look(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=0)
    label = str(Label.fresh("5eed0001", 0, expires_at=fake.clock.now()))
    old = fake.clock.now() - 3600
    lab.journal.intent(Entry(label=label, state="intent", account=lab.account, intent_at=old))
    before = len(fake.requests)
    assert [one.how for one in lab.end().ended] == ["never appeared"]
    assert len(fake.requests) == before + 1


def test_a_new_instance_that_nobody_sees_yet_is_not_taken_for_gone(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=1)
    fake.instance(lab.ids[0]).invisible_reads = 4
    outcome = lab.end()
    assert [one.how for one in outcome.ended] == ["destroyed"]
    lab.check_empty()


def test_another_account_cannot_say_that_an_instance_is_gone(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=0)
    label = str(Label.fresh("5eed0001", 0, expires_at=fake.clock.now()))
    lab.journal.intent(Entry(label=label, state="intent", account="elsewhere/9", intent_at=1.0))
    lab.journal.created(label, 4711, at=1.0)
    unclear = str(Label.fresh("5eed0001", 1, expires_at=fake.clock.now()))
    lab.journal.intent(Entry(label=unclear, state="intent", account="elsewhere/9", intent_at=1.0))
    outcome = lab.end()
    assert not outcome.ended and {one.why for one in outcome.leftovers} == {
        "this account does not show it: it is on the bill of elsewhere/9, ask with its key"
    }
    assert len(lab.journal.open_entries()) == 2


def test_an_instance_that_was_gone_already_is_told_as_that(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=1)
    fake.clock.advance(3600)
    run(lab.api.destroy(lab.ids[0]))
    for _ in range(3):
        run(lab.api.instance(lab.ids[0]))
    assert [one.how for one in lab.end().ended] == ["was gone"]
    lab.check_empty()


def test_a_run_with_nothing_open_costs_one_look_and_one_without_a_single_create_none(fake, tmp_path):
    lab = Run(fake, tmp_path, instances=0)
    before = len(fake.requests)
    assert lab.end().ended == () and len(fake.requests) == before
    label = str(Label.fresh("5eed0001", 0, expires_at=fake.clock.now()))
    lab.journal.intent(Entry(label=label, state="intent", account=lab.account, intent_at=fake.clock.now()))
    lab.journal.refused(label, "no_such_ask", at=fake.clock.now())
    assert lab.end().ended == () and len(fake.requests) == before + 1


def test_instances_that_no_journal_owns_are_ended_the_same_way(fake, tmp_path):
    lab = Run(fake, tmp_path)
    outcome = run(end_instances(lab.api, [Target(number, None) for number in lab.ids], within_s=90.0))
    assert len(outcome.ended) == 2 and fake.ledger()["live"] == []
