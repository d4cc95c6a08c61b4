"""How long many machines take to be destroyed and seen gone, in virtual time at the documented intervals; and what the
looks at the account, which confirm them all together, may and may not conclude."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ppsmoke.rent import vast_api
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.destroy import end_run
from ppsmoke.rent.labels import Label
from ppsmoke.rent.ledger import Entry, Journal
from ppsmoke.rent.pacer import SPACING_S, Pacer, Route
from ppsmoke.rent.plan import MAX_REPLACEMENTS
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.vast_fleet import DESTROY_S, destroy_budget_s
from ppsmoke.rent.vast_http import NoReply, Reply, UrllibTransport
from tests.lab.fake_vast import FakeVast
from tests.rent.test_destroy import Run
from tests.rent.vast_lab import KEY, FakeTime, reply, run

LAST_END_S = 9.0  # the last DELETE's confirmation, which takes the fake three reads
TROUBLES = {  # what the API does meanwhile
    "nothing": (),
    "three DELETEs are refused as too frequent": (("destroy.429", 3),),
    "three DELETEs have no clear answer": (("destroy.502", 3),),
    "two DELETEs are taken and ignored": (("destroy.ignored", 2),),
    "a list and four reads fail": (("list.502", 1), ("show.502", 4)),
    "lists fail": (("list.502", None),),
}


def seconds_to_end(fake: FakeVast, instances: int, folder, *, age_s: float) -> float:
    """Virtual seconds from the first DELETE to the last confirmation, of instances that were made age_s ago."""
    lab = Run(fake, folder, instances=instances)
    now = fake.clock.now()
    for entry in lab.journal.open_entries():
        lab.journal.entries[entry.label] = replace(entry, created_at=now - age_s)
    outcome = lab.end(DESTROY_S)
    assert len(outcome.ended) == instances and not outcome.leftovers
    lab.check_empty()
    assert fake.ledger()["too_early"] == {}
    return fake.clock.now() - now


@pytest.mark.parametrize("stages", [2, 8, 16])
def test_the_machines_of_an_ordinary_run_end_in_little_more_than_their_deletes_spacing(stages, tmp_path):
    with FakeVast(enforce_limits=True) as fake:
        seconds = seconds_to_end(fake, stages, tmp_path, age_s=120.0)
    print(f"{stages} stages: {seconds:.1f} s")
    assert seconds <= (stages - 1) * SPACING_S[Route.DESTROY] + LAST_END_S


# Where no list ever comes, single reads are too slow for many machines: the reaper goes on with what is left.
WORST = [(stages, trouble) for stages in (2, 8, 16) for trouble in TROUBLES if stages == 2 or trouble != "lists fail"]


@pytest.mark.parametrize(("stages", "trouble"), [
    pytest.param(stages, trouble, marks=[] if stages == 2 else [pytest.mark.slow]) for stages, trouble in WORST
])  # fmt: skip
def test_all_machines_of_a_run_are_seen_gone_within_their_budget(stages, trouble, tmp_path):
    """At worst: as many more as may be replaced, all too young for a list to be proof, and lists of two pages."""
    with FakeVast(enforce_limits=True, decoys=[f"other-{index}" for index in range(30)]) as fake:
        for name, count in TROUBLES[trouble]:
            fake.fault(name, count)
        seconds = seconds_to_end(fake, stages + MAX_REPLACEMENTS, tmp_path, age_s=0.0)
    print(f"{stages} stages and {MAX_REPLACEMENTS} replaced hosts, {trouble}: {seconds:.1f} s")
    assert seconds <= DESTROY_S


def test_what_a_run_gets_for_destroying_grows_with_it_from_17_stages_on():
    assert [destroy_budget_s(stages) for stages in (1, 2, 16)] == [90.0] * 3
    assert destroy_budget_s(17) > 90.0 and destroy_budget_s(64) == pytest.approx(65 * 3.5 + 24 + 6)


class Account:
    """An account of these rows, two a page; `steps` name rows that go, one each, between a first and a second page."""

    def __init__(self, rows: dict[int, str], steps=()) -> None:
        self.rows, self.steps = dict(rows), list(steps)
        self.ignores_deletes = True
        self.deletes = reply(200, {"success": True})
        self.bodies: set[int] = set()  # what is there although no list shows it
        self.asked: list[tuple[str, int]] = []

    def exchange(self, method: str, target: str, *, body: bytes | None, within_s: float) -> Reply:
        if target.startswith("/api/v1/"):
            return self._list(target)
        number = int(target.split("/")[4])
        self.asked.append((method, number))
        if method == "GET":
            return reply(200, {"instances": {"id": number} if number in self.bodies | self.rows.keys() else None})
        if not self.ignores_deletes:
            self.rows.pop(number, None)
        return self.deletes

    def _list(self, target: str) -> Reply:
        """Pages by position, so that a row that goes away moves all behind it."""
        first = "after_token" not in target
        if not first and self.steps:
            self.rows.pop(self.steps.pop(0), None)
        rows = [{"id": number, "label": label} for number, label in sorted(self.rows.items())]
        start = 0 if first else int(target.rpartition("after_token=")[2])
        more = str(start + 2) if len(rows) > start + 2 else None
        return reply(200, {"instances": rows[start : start + 2], "next_token": more})


def journal_of(folder, time: FakeTime, *ids: int, made_at: float = 1.0) -> tuple[Journal, list[str]]:
    journal = Journal.start(folder, "5eed0001", at=time.wall())
    labels = []
    for number in ids:
        label = str(Label.fresh("5eed0001", 0, expires_at=time.wall() + 600))
        journal.intent(Entry(label=label, state="intent", account="lab/1", intent_at=made_at))
        journal.created(label, number, at=made_at)
        labels.append(label)
    return journal, labels


def test_a_row_that_slips_between_two_pages_is_not_taken_for_gone(tmp_path):
    time = FakeTime()
    journal, (label,) = journal_of(tmp_path, time, 3)
    account = Account({1: "x", 2: "y", 3: label, 4: "z"}, steps=[1])  # 3 moves to the first page, which was read
    outcome = run(end_run(VastApi(account, clock=time), journal, account="lab/1", within_s=20.0))
    assert [one.instance_id for one in outcome.leftovers] == [3] and ("GET", 3) in account.asked
    account.ignores_deletes = False
    outcome = run(end_run(VastApi(account, clock=time), journal, account="lab/1", within_s=20.0))
    assert [one.how for one in outcome.ended] == ["destroyed"]


def test_a_list_that_is_wrongly_empty_is_believed_by_nobody_while_no_delete_has_been_answered(tmp_path):
    time = FakeTime()
    journal, _ = journal_of(tmp_path, time, 3)
    account = Account({})  # no list shows it
    account.bodies, account.deletes = {3}, reply(429, "API requests too frequent")
    outcome = run(end_run(VastApi(account, clock=time), journal, account="lab/1", within_s=30.0))
    assert [one.instance_id for one in outcome.leftovers] == [3] and ("GET", 3) in account.asked
    account.bodies.clear()
    outcome = run(end_run(VastApi(account, clock=time), journal, account="lab/1", within_s=30.0))
    assert [one.how for one in outcome.ended] == ["was gone"]


def test_each_end_is_told_as_it_is_confirmed_and_what_is_missing_every_ten_seconds(tmp_path):
    time, said, ended = FakeTime(), [], []
    journal, labels = journal_of(tmp_path, time, 1, 2)
    account = Account(dict(zip((1, 2), labels, strict=True)))
    account.ignores_deletes = True
    api = VastApi(account, clock=time)

    async def story():
        ending = end_run(api, journal, account="lab/1", within_s=40.0, say=said.append, on_ended=ended.append)
        task = asyncio.ensure_future(ending)
        await time.sleep(6.0)
        account.rows.pop(1)
        while not ended:
            await time.sleep(0.5)
        assert not task.done()
        return await task

    outcome = run(story())
    assert [one.instance_id for one in ended] == [1] and [one.instance_id for one in outcome.leftovers] == [2]
    waiting = [line for line in said if line.startswith("not yet confirmed as ended: instance 2 (")]
    assert len(waiting) in (2, 3)


def test_a_create_under_way_is_ended_when_its_reply_comes_and_the_others_do_not_wait_for_it(tmp_path):
    time = FakeTime()
    journal, (known,) = journal_of(tmp_path, time, 1)
    account = Account({1: known})
    account.ignores_deletes = False
    label = str(Label.fresh("5eed0001", 1, expires_at=time.wall() + 600))
    journal.intent(Entry(label=label, state="intent", account="lab/1", intent_at=time.wall()))
    ended_at: dict[int | None, float] = {}

    async def story():
        creating = asyncio.ensure_future(create())
        return await end_run(
            VastApi(account, clock=time),
            journal,
            account="lab/1",
            within_s=84.0,
            on_ended=lambda ended: ended_at.setdefault(ended.instance_id, time.now()),
            coming=lambda: not creating.done(),
        )

    async def create() -> None:
        await time.sleep(20.0)
        account.rows[7] = label  # it shows before its reply comes
        await time.sleep(10.0)
        journal.created(label, 7, at=time.wall())

    outcome = run(story())
    assert ended_at[1] < 5.0 and 20.0 <= ended_at[7] < 30.0 and not outcome.leftovers
    assert not journal.open_entries() and [one.instance_id for one in outcome.ended] == [1, 7]


def test_nobody_waits_for_a_turn_that_would_come_too_late():
    time = FakeTime()

    async def story() -> list[bool]:
        pacer = Pacer(time)
        return list(await asyncio.gather(*(pacer.turn(Route.DESTROY, until=5.0) for _ in range(4))))

    assert run(story()) == [True, True, False, False] and time.now() <= 5.0


def test_sixteen_failing_calls_are_one_line_and_a_silent_service_is_told_of(monkeypatch):
    said: list[str] = []
    api = VastApi(_Dead(), clock=FakeTime(), host="lab", say=said.append)

    async def story() -> None:
        await asyncio.gather(*(api.destroy(number, within_s=15.0) for number in range(16)), return_exceptions=True)

    run(story())
    assert 1 <= len(said) <= 4 and all(line.startswith("destroy: Connection refused; again in ") for line in said)
    monkeypatch.setattr(vast_api, "TELL_WAIT_S", 0.02)
    with FakeVast() as fake:
        fake.fault("list.hang")
        said.clear()

        async def hung() -> None:
            told = asyncio.Event()
            api = VastApi(UrllibTransport(fake.url, ApiKey(KEY)), clock=FakeTime(fake), host="lab", say=tell(told))
            task = asyncio.ensure_future(api.instances())
            await asyncio.wait_for(told.wait(), 15.0)  # the answer would take 20 s
            task.cancel()

        def tell(told: asyncio.Event):
            return lambda text: (said.append(text), told.set())

        run(hung())
    assert said == ["list: no answer from lab yet"]


class _Dead:
    def exchange(self, *args, **kwargs) -> Reply:
        raise NoReply("Connection refused", sent=False)


def test_a_listing_says_of_how_many_pages_it_is():
    account = Account({number: "x" for number in range(1, 6)})
    listing = run(VastApi(account, clock=FakeTime()).instances())
    assert listing.pages == 3 and len(listing.instances) == 5
