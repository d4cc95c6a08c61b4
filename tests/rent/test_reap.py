"""Whose is what, and what a start, `reap` and the reaper do about it. Foreign instances are never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppsmoke.errors import RentError
from ppsmoke.rent import reaper as reaper_module
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.clock import LAB_CLOCK, RealClock
from ppsmoke.rent.labels import Label
from ppsmoke.rent.ledger import Entry, Journal, JournalView, read_journals
from ppsmoke.rent.reap import Whose, ls_lines, settle, settled_lines, sort_out, to_json
from ppsmoke.rent.reaper import Order, Reaper
from ppsmoke.rent.shapes import Instance, Listing
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import AuthRefused, Unreachable
from tests.lab.fake_vast import FakeVast
from tests.rent.test_destroy import Run
from tests.rent.vast_lab import KEY, client, run

ROOT = Path(__file__).parents[2]
NOW = 1_800_000_000.0
LIVE, DEAD = "aaaa0001", "dddd0001"


def label(run_id: str, *, expires_in_s: float = 600.0) -> str:
    return str(Label(run_id, 0, "00000001", int(NOW + expires_in_s)))


def view(run_id: str, *entries: Entry, alive: bool, damaged: int = 0) -> JournalView:
    found = {entry.label: entry for entry in entries}
    return JournalView(Path(f"/x/{run_id}.jsonl"), alive, "run 4711", found, damaged)


def entry(of: str, *, instance_id: int | None = None, state: str = "created") -> Entry:
    return Entry(label=of, state=state, instance_id=instance_id, account="lab/1")


JOURNALS = [
    view(LIVE, entry(label(LIVE), instance_id=1), entry(label(LIVE, expires_in_s=-9000), instance_id=2), alive=True),
    view(DEAD, entry(label(DEAD), instance_id=3), entry(label(DEAD, expires_in_s=1), state="intent"), alive=False),
]


@pytest.mark.parametrize(("instance_id", "text", "whose"), [
    (1, label(LIVE), Whose.LIVE_RUN),
    (2, label(LIVE, expires_in_s=-9000), Whose.LIVE_RUN),  # a held lock means alive, whatever the label says
    (1, "renamed by hand", Whose.LIVE_RUN),
    (3, label(DEAD), Whose.DEAD_RUN),
    (3, None, Whose.DEAD_RUN),
    (77, label(DEAD, expires_in_s=1), Whose.DEAD_RUN),  # its create was unclear
    (77, label(DEAD, expires_in_s=2), Whose.OTHER_RUN),  # the run's id by chance: no label of ours
    (77, label("bbbb0001"), Whose.OTHER_RUN),
    (77, label("bbbb0001", expires_in_s=-299), Whose.OTHER_RUN),
    (77, label("bbbb0001", expires_in_s=-302), Whose.EXPIRED),
    (77, "ppsmoke-production-db", Whose.PREFIXED),
    (77, "ppsmoke2-bbbb0001-0-00000001-1000000000", Whose.FOREIGN),
    (77, "ppsmoke", Whose.FOREIGN),
    (77, "train-7b", Whose.FOREIGN),
    (77, None, Whose.FOREIGN),
])  # fmt: skip
def test_whose_an_instance_is(instance_id, text, whose):
    listing = Listing((Instance(id=instance_id, label=text),))
    finding = next(one for one in sort_out(listing, JOURNALS, now=NOW) if one.instance is not None)
    assert finding.whose is whose
    assert finding.to_be_ended == (whose in (Whose.DEAD_RUN, Whose.EXPIRED))


def test_a_dead_runs_entry_without_an_instance_is_a_finding_too():
    findings = sort_out(Listing(()), JOURNALS, now=NOW)
    assert [(one.whose, one.entry and one.entry.instance_id) for one in findings] == [
        (Whose.DEAD_RUN, 3), (Whose.DEAD_RUN, None)]  # fmt: skip


def test_a_damaged_journal_owns_by_its_runs_id():
    listing = Listing((Instance(id=77, label=label(DEAD, expires_in_s=2)),))
    assert sort_out(listing, [view(DEAD, alive=False, damaged=1)], now=NOW)[0].whose is Whose.DEAD_RUN


def test_a_clock_that_runs_ahead_here_ends_nobodys_run():
    listing = Listing((Instance(id=77, label=label("bbbb0001")),), served_at=NOW)
    assert sort_out(listing, [], now=NOW + 86400)[0].whose is Whose.OTHER_RUN


@pytest.fixture
def fake():
    with FakeVast() as service:
        yield service
        assert service.ledger()["decoys_touched"] == 0 and service.ledger()["leaks"] == {}


def die(lab: Run) -> None:
    """What the kernel does for a killed process."""
    os.close(lab.journal._fd)
    lab.journal._fd = -1


def test_a_start_ends_what_a_dead_run_left_and_touches_no_live_one(fake, tmp_path):
    dead, live = Run(fake, tmp_path, run_id=DEAD), Run(fake, tmp_path, run_id=LIVE, instances=1)
    lost = dead.rent(1, written="nothing")
    die(dead)
    settled = run(settle(live.api, tmp_path))
    assert {one.instance_id for one in settled.outcome.ended} == {*dead.ids, lost}
    assert [one["id"] for one in fake.ledger()["live"]] == live.ids
    assert [view.run_id for view in read_journals(tmp_path)] == [LIVE]
    text = "\n".join(settled_lines(settled))
    assert "in use: instance" in text and "left alone: instance" in text  # the decoy with our prefix
    live.end()


def test_two_state_folders_never_touch_each_others_live_runs(fake, tmp_path):
    ours, theirs = Run(fake, tmp_path / "a", run_id=DEAD), Run(fake, tmp_path / "b", run_id=LIVE)
    die(ours)
    die(theirs)  # dead, but not ours to know
    settled = run(settle(ours.api, tmp_path / "a"))
    assert {one.instance_id for one in settled.outcome.ended} == set(ours.ids)
    assert {one.instance.id for one in settled.untouched} > set(theirs.ids)
    assert {one["id"] for one in fake.ledger()["live"]} == set(theirs.ids)
    assert f"vastai destroy instance {theirs.ids[0]}" in "\n".join(settled_lines(settled))
    fake.clock.advance(600 + 301)  # their labels expire
    settled = run(settle(client(fake), tmp_path / "a"))
    assert {one.instance_id for one in settled.outcome.ended} == set(theirs.ids) and fake.ledger()["live"] == []


def test_many_dead_runs_hold_up_a_start_for_little_longer_than_one_where_nothing_can_be_ended(fake, tmp_path):
    dead = [Run(fake, tmp_path, run_id=f"dddd000{number}", instances=1) for number in range(3)]
    for one in dead:
        die(one)
    fake.fault("destroy.429", None)
    began = fake.clock.now()
    settled = run(settle(client(fake), tmp_path))
    assert len(settled.outcome.leftovers) == 3 and fake.clock.now() - began <= 200.0
    fake.clear_fault("destroy.429")
    run(settle(client(fake), tmp_path))


def test_a_dry_run_ends_nothing_and_says_what_it_would(fake, tmp_path):
    dead = Run(fake, tmp_path, run_id=DEAD)
    die(dead)
    before = len(fake.requests)
    settled = run(settle(dead.api, tmp_path, dry_run=True))
    assert all(request.method == "GET" for request in fake.requests[before:])
    assert sum("would end" in line for line in settled_lines(settled, dry_run=True)) == 2
    assert len(fake.ledger()["live"]) == 2 and not read_journals(tmp_path)[0].owner_alive
    run(settle(dead.api, tmp_path))


def test_reap_all_ends_what_is_chosen_and_is_never_shown_foreign_or_live_ones(fake, tmp_path):
    live, theirs = Run(fake, tmp_path / "a", run_id=LIVE), Run(fake, tmp_path / "b", run_id=DEAD)
    shown = []

    def choose(findings):
        shown.extend(findings)
        return [one for one in findings if one.instance.id == theirs.ids[0]]

    settled = run(settle(live.api, tmp_path / "a", choose_more=choose))
    assert {one.whose for one in shown} == {Whose.OTHER_RUN}
    assert [one.instance_id for one in settled.outcome.ended] == [theirs.ids[0]]
    assert theirs.ids[1] in {one.instance.id for one in settled.untouched}
    live.end()
    theirs.end()


@pytest.mark.parametrize("wanted", [26, 60])
def test_a_dead_run_is_found_on_the_last_page(wanted, tmp_path):
    with FakeVast(decoys=[f"other-{index}" for index in range(wanted)]) as fake:
        dead = Run(fake, tmp_path, run_id=DEAD, instances=0)
        lost = dead.rent(0, written="nothing")
        die(dead)
        assert [one.instance_id for one in run(settle(dead.api, tmp_path)).outcome.ended] == [lost]
        assert fake.ledger()["live"] == [] and fake.ledger()["decoys_touched"] == 0


@pytest.mark.parametrize(("fault", "error"), [("list.502", Unreachable), ("any.404-auth", AuthRefused)])
def test_an_account_that_cannot_be_listed_is_an_error_not_an_empty_one(fake, tmp_path, fault, error):
    dead = Run(fake, tmp_path, run_id=DEAD)
    die(dead)
    fake.fault(fault, None)
    with pytest.raises(error):
        run(settle(client(fake), tmp_path))
    fake.clear_fault(fault)
    assert len(read_journals(tmp_path)[0].entries) == 2
    run(settle(dead.api, tmp_path))


def test_what_cannot_be_confirmed_stays_in_the_journal_and_is_named(fake, tmp_path):
    dead = Run(fake, tmp_path, run_id=DEAD, instances=1)
    die(dead)
    fake.fault("destroy.ignored", None)
    settled = run(settle(dead.api, tmp_path, within_s=30.0))
    line = next(line for line in settled_lines(settled) if "NOT CONFIRMED" in line)
    assert str(dead.ids[0]) in line and "vastai destroy instance" in line
    assert read_journals(tmp_path)[0].entries
    fake.clear_fault("destroy.ignored")
    run(settle(dead.api, tmp_path))
    assert fake.ledger()["live"] == []


def test_ls_says_what_is_paid_for_now(fake, tmp_path):
    lab = Run(fake, tmp_path, run_id=LIVE)
    fake.clock.advance(1800)
    listing = run(lab.api.instances())
    findings = sort_out(listing, read_journals(tmp_path), now=lab.api.clock.wall())
    text = "\n".join(ls_lines(findings, now=lab.api.clock.wall()))
    assert "2 of this state folder's runs, $" in text and "a live run of this state folder (run " in text
    assert "1 of other runs, on another machine or in another state folder, $0.168 an hour" in text
    assert "another run, of another machine or state folder, alive for at most " in text
    assert "for 30 min" in text and "4 other instances" in text and "of ours" not in text
    rows = to_json(findings, now=lab.api.clock.wall())
    assert {row["whose"] for row in rows} == {"live_run", "other_run"} and rows[-1]["age_s"] >= 1800
    lab.end()
    assert ls_lines([], now=NOW) == ["nothing of this state folder's runs is rented on this account"]


def test_ls_tells_how_long_another_runs_time_has_been_over_and_only_counts_what_is_foreign():
    rows = [
        Instance(id=5, label=label("bbbb0001", expires_in_s=-1200), dph_total=0.2, gpu_name="L4"),
        Instance(id=6, label=label("cccc0001", expires_in_s=120), dph_total=0.1),
        Instance(id=7, label="ppsmoke-production-db", dph_total=0.4),
        Instance(id=8, label="train-7b", dph_total=9.0),
    ]
    findings = sort_out(Listing(tuple(rows)), [], now=NOW)
    lines = ls_lines(findings, now=NOW)
    assert lines[0].endswith("another run, whose time is over (20 min ago)")
    assert lines[1].endswith("another run, of another machine or state folder, alive for at most 2 more min")
    assert lines[2].endswith("no run of ours, though its label starts like one's")
    assert lines[3:] == [
        "2 of other runs, on another machine or in another state folder, $0.300 an hour",
        "1 with a label that only starts like ours, $0.400 an hour",
        "nothing of this state folder's runs is rented on this account",
        "1 other instance on this account",
    ]
    assert [row["expires_at"] for row in to_json(findings, now=NOW)] == [NOW - 1200, NOW + 120, None]


# The reaper and the kill tests: real processes, in a world that runs 60 times as fast.

SPEED = 60.0


@contextmanager
def fast_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVast]:
    epoch = time.time()
    monkeypatch.setenv(LAB_CLOCK, f"{SPEED}@{epoch}")
    monkeypatch.setenv("VAST_API_KEY", "typed-elsewhere")
    with FakeVast(scale=SPEED, start=epoch) as fake:
        yield fake
        ledger = fake.ledger()
        assert ledger["live"] == [] and ledger["decoys_touched"] == 0 and ledger["leaks"] == {}


def start_victim(fake: FakeVast, folder: Path, net: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.rent.victim", fake.url, str(folder), net]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert process.stdin is not None
    process.stdin.write(KEY + "\n")
    process.stdin.close()
    process.stdin = None  # communicate would flush it
    return process


def wait_until(condition, what: str, within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def settle_here(fake: FakeVast, folder: Path) -> None:
    api = VastApi.open(ApiKey(KEY), fake.url, clock=RealClock.from_environment(os.environ))
    run(settle(api, folder))


MOMENTS = {
    "before intent": ("search", "after"),
    "during create": ("create", "before"),
    "after create, before its reply": ("create", "after"),
    "before destroy": ("destroy", "before"),
    "after destroy, before its reply": ("destroy", "after"),
    "while it is being seen gone": ("show", "after"),
}
QUICK = {("after create, before its reply", "with"), ("during create", "without")}


@pytest.mark.parametrize(("moment", "net"), [
    pytest.param(moment, net, marks=[] if (moment, net) in QUICK else [pytest.mark.slow])
    for moment in MOMENTS for net in ("with", "without")
])  # fmt: skip
def test_a_run_killed_at_any_moment_leaves_nothing_rented(monkeypatch, tmp_path, moment, net):
    """with: its reaper ends what it left; without: the next start does."""
    with fast_world(monkeypatch) as fake:
        victims: list[subprocess.Popen[str]] = []
        route, when = MOMENTS[moment]

        def kill(request, instance_id) -> None:
            if victims and victims[0].poll() is None:
                victims[0].kill()
                victims[0].wait()

        fake.on(route, when, kill)
        victims.append(start_victim(fake, tmp_path, net))
        with victims[0] as victim:
            victim.communicate(timeout=60)
        assert victim.returncode == -signal.SIGKILL
        if net == "without":
            settle_here(fake, tmp_path)
        wait_until(lambda: not list((tmp_path / "journal").iterdir()), "the journal and the reaper's log are gone")


@pytest.mark.slow
def test_a_run_that_ends_well_dismisses_its_reaper_which_has_seen_no_key(monkeypatch, tmp_path):
    with fast_world(monkeypatch) as fake:
        seen: dict[str, bytes] = {}

        def look(request, instance_id) -> None:
            for name in ("environ", "cmdline"):
                seen[name] = Path(f"/proc/{pid}/{name}").read_bytes() if Path("/proc/self").exists() else b""

        fake.on("create", "before", look)
        with start_victim(fake, tmp_path, "with") as victim:
            assert victim.stdout is not None
            pid = int(victim.stdout.readline())
            rest, _ = victim.communicate(timeout=60)
        assert rest.split() == ["True", "1", "0"] and victim.returncode == 0
        assert list((tmp_path / "journal").iterdir()) == []
        assert seen and all(KEY.encode() not in data and b"VAST_API_KEY" not in data for data in seen.values())
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the reaper has ended")


@pytest.mark.slow
def test_signals_that_end_a_terminal_do_not_end_the_reaper(monkeypatch, tmp_path):
    with fast_world(monkeypatch) as fake:
        pids: list[int] = []

        def kill_all(request, instance_id) -> None:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pids[0], number)
            victim.kill()

        fake.on("destroy", "before", kill_all)
        with start_victim(fake, tmp_path, "with") as victim:
            assert victim.stdout is not None
            pids.append(int(victim.stdout.readline()))
            victim.communicate(timeout=60)
        wait_until(lambda: not list((tmp_path / "journal").iterdir()), "the reaper did its work")


def test_a_reaper_that_does_not_start_means_rent_nothing(tmp_path, monkeypatch):
    journal = Journal.start(tmp_path, LIVE, at=1.0)
    monkeypatch.setattr(reaper_module, "_CODE", "import sys; sys.exit(3)")
    with pytest.raises(RentError, match="did not start"):
        Reaper.start(journal, key=ApiKey(KEY), url="http://127.0.0.1:1", account="lab/1")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RentError, match="cannot start"):
        Reaper.start(journal, key=ApiKey(KEY), url="http://127.0.0.1:1", account="lab/1")


@pytest.mark.slow
def test_a_reaper_that_keeps_failing_tries_on_and_leaves_the_rest_to_the_next_start(fake, tmp_path):
    dead = Run(fake, tmp_path, run_id=DEAD, instances=1)
    die(dead)
    fake.fault("destroy.429", None)
    order = Order(ApiKey(KEY), fake.url, dead.account, dead.journal.path)
    said: list[str] = []
    began = fake.clock.now()
    assert run(reaper_module.reap(client(fake), order, say=said.append)) == 1
    assert fake.clock.now() - began >= 1500 and "next start" in said[-1]
    fake.clear_fault("destroy.429")
    assert run(reaper_module.reap(client(fake), order, say=said.append)) == 0
    assert fake.ledger()["live"] == [] and run(reaper_module.reap(client(fake), order, say=said.append)) == 0


@pytest.mark.parametrize("line", [b"[]", b"{}", b"nonsense", b'{"key":"k","url":"u","account":1,"journal":"j"}'])
def test_an_order_that_is_none_is_refused(line):
    with pytest.raises(ValueError):
        Order.read(line)
