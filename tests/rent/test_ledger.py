"""The journal: what a kill, a full disk and two runs at once leave of it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppsmoke.rent import ledger
from ppsmoke.rent.labels import Label, has_prefix
from ppsmoke.rent.ledger import Entry, Journal, LedgerError, fold, parse, read_journals

ROOT = str(Path(__file__).parents[2])


def entry(label: str = "a", **changes) -> Entry:
    return Entry(**{"label": label, "state": "intent", "stage": 1, "account": "host/1", "intent_at": 5.0, **changes})


def start(folder: Path, run_id: str = "run1") -> Journal:
    return Journal.start(folder, run_id, at=1.0)


def test_the_state_is_a_fold_over_the_records():
    entries = fold([
        {"owner": "run", "pid": 1},
        {"state": "intent", "label": "a", "stage": 0, "at": 1.0, "account": "x", "dph": 0.2},
        {"state": "intent", "label": "b", "stage": 1, "at": 2.0},
        {"state": "created", "label": "a", "instance_id": 7, "at": 3.0},
        {"state": "refused", "label": "b", "why": "no_such_ask"},
        {"state": "destroying", "label": "a"},
        {"state": "intent", "label": "c", "at": 4.0},
        {"state": "of a later version", "label": "c"},
        {"label": 7, "state": "gone"},
    ])  # fmt: skip
    assert [(one.label, one.state, one.instance_id, one.open) for one in entries.values()] == [
        ("a", "destroying", 7, True), ("b", "refused", None, False), ("c", "intent", None, True)]  # fmt: skip
    assert entries["a"].created_at == 3.0 and entries["a"].intent_at == 1.0 and entries["a"].account == "x"


def test_an_instance_that_shows_up_after_all_is_open_again():
    entries = fold([
        {"state": "intent", "label": "a", "at": 1.0},
        {"state": "gone", "label": "a", "why": "never appeared"},
        {"state": "created", "label": "a", "instance_id": 7, "at": 9.0},
    ])  # fmt: skip
    assert entries["a"].open and entries["a"].instance_id == 7


def test_a_record_is_enough_without_those_before_it():
    assert fold([{"state": "destroying", "label": "a", "instance_id": 7, "at": 1.0}])["a"].instance_id == 7


DATA = b'{"state":"intent","label":"a","at":1.0}\n{"state":"created","label":"a","instance_id":7,"at":2.0}\n'


@pytest.mark.parametrize("cut", range(len(DATA) + 1))
def test_a_journal_cut_anywhere_is_read_up_to_its_last_whole_record(cut):
    records, damaged = parse(DATA[:cut])
    assert damaged == 0
    first = DATA.index(b"\n")
    assert len(records) == (cut >= first) + (cut >= len(DATA) - 1)


def test_a_damaged_line_in_the_middle_is_counted_and_passed_over():
    records, damaged = parse(b'{"label":"a"}\nga\xffrbage\n[1]\n\n{"label":"b"}\n')
    assert [one["label"] for one in records] == ["a", "b"] and damaged == 2


def test_a_life_on_disk(tmp_path):
    journal = start(tmp_path)
    journal.intent(entry())
    journal.created("a", 7, at=6.0)
    (seen,) = read_journals(tmp_path)
    assert seen.owner_alive and seen.owner == f"run {os.getpid()}" and seen.run_id == "run1"
    assert seen.entries == journal.entries and seen.entries["a"].stage == 1
    assert Journal.adopt(journal.path, role="settle", at=7.0) is None
    journal.destroying("a", at=8.0)
    journal.gone("a", "destroyed", at=9.0)
    journal.close()
    journal.close()
    assert read_journals(tmp_path) == [] and list((tmp_path / "journal").iterdir()) == []


def test_files_are_the_owners_alone(tmp_path):
    journal = start(tmp_path / "deep" / "state")
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert journal.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_dead_owners_journal_is_taken_over_by_one_only(tmp_path):
    dead = start(tmp_path)
    dead.intent(entry())
    os.close(dead._fd)  # what the kernel does for a killed process
    (seen,) = read_journals(tmp_path)
    assert not seen.owner_alive
    heir = Journal.adopt(dead.path, role="reaper", at=2.0)
    assert heir is not None and heir.open_entries()[0].label == "a"
    assert Journal.adopt(dead.path, role="settle", at=3.0) is None
    assert read_journals(tmp_path)[0].owner == f"reaper {os.getpid()}"
    heir.close()  # with something open: it stays
    assert read_journals(tmp_path)[0].entries["a"].open


def test_a_torn_line_does_not_spoil_what_the_heir_writes(tmp_path):
    dead = start(tmp_path)
    dead.intent(entry())
    os.write(dead._fd, b'{"state":"created","lab')
    os.close(dead._fd)
    heir = Journal.adopt(dead.path, role="settle", at=2.0)
    assert heir is not None
    heir.created("a", 7, at=3.0)
    (seen,) = read_journals(tmp_path)
    assert seen.entries["a"].instance_id == 7 and seen.damaged == 1


def test_a_damaged_journal_is_put_aside_not_thrown_away(tmp_path):
    dead = start(tmp_path)
    path = dead.path
    os.write(dead._fd, b"garbage\n")
    os.close(dead._fd)
    heir = Journal.adopt(path, role="settle", at=2.0)
    assert heir is not None and heir.damaged == 1
    heir.close()
    assert read_journals(tmp_path) == [] and path.with_suffix(".damaged").exists()


def test_two_runs_at_once_keep_a_journal_each(tmp_path):
    one, other = start(tmp_path, "run1"), start(tmp_path, "run2")
    one.intent(entry("a"))
    other.intent(entry("b"))
    assert [(seen.run_id, list(seen.entries), seen.owner_alive) for seen in read_journals(tmp_path)] == [
        ("run1", ["a"], True), ("run2", ["b"], True)]  # fmt: skip
    with pytest.raises(LedgerError):
        start(tmp_path, "run1")
    assert read_journals(tmp_path)[0].entries["a"].open


@pytest.mark.parametrize("run_id", ["", "a", "../../etc", "run/1", "RUN1", "x" * 21])
def test_a_run_id_is_no_path(tmp_path, run_id):
    with pytest.raises(ValueError):
        Journal.start(tmp_path, run_id, at=1.0)


def test_a_folder_that_cannot_be_written_means_rent_nothing(tmp_path):
    (tmp_path / "journal").write_text("a file where the folder should be")
    with pytest.raises(LedgerError, match="cannot keep the journal") as caught:
        start(tmp_path)
    assert "XDG_STATE_HOME" in caught.value.hint


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_means_rent_nothing(tmp_path):
    journal = start(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    with pytest.raises(LedgerError, match="No space left"):
        journal.intent(entry())
    assert journal.entries == {}


def test_a_disk_that_fills_up_at_the_start_leaves_no_file(tmp_path, monkeypatch):
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger.os, "write", full)
    with pytest.raises(LedgerError, match="No space left"):
        start(tmp_path)
    assert list((tmp_path / "journal").iterdir()) == []


def test_half_a_line_on_a_full_disk_does_not_spoil_the_next(tmp_path, monkeypatch):
    journal = start(tmp_path)
    write = os.write
    monkeypatch.setattr(ledger.os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(LedgerError):
        journal.intent(entry("a"))
    monkeypatch.undo()
    journal.intent(entry("b"))
    assert list(read_journals(tmp_path)[0].entries) == ["b"]


def test_an_id_is_remembered_even_if_it_cannot_be_written(tmp_path, monkeypatch):
    journal = start(tmp_path)
    journal.intent(entry())

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ledger.os, "fsync", broken)
    with pytest.raises(LedgerError):
        journal.created("a", 7, at=6.0)
    assert journal.open_entries()[0].instance_id == 7


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_journal_that_cannot_be_removed_is_given_up_all_the_same(tmp_path, monkeypatch, damaged):
    journal = start(tmp_path)
    journal.damaged = damaged

    def read_only(*args, **kwargs) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", read_only)
    monkeypatch.setattr(ledger.os, "replace", read_only)
    journal.close()
    (view,) = read_journals(tmp_path)
    assert not view.owner_alive and not view.entries


def test_a_file_system_without_locks_means_rent_nothing(tmp_path, monkeypatch):
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LedgerError):
        start(tmp_path)


STEPS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from ppsmoke.rent.ledger import Entry, Journal
journal = Journal.start(Path(sys.argv[2]), "victim", at=1.0)
steps = [lambda: journal.intent(Entry(label="a", state="intent", intent_at=2.0)),
         lambda: journal.created("a", 7, at=3.0),
         lambda: journal.destroying("a", at=4.0), lambda: journal.gone("a", "destroyed", at=5.0)]
for step in steps[:int(sys.argv[3])]:
    step()
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("steps", "state", "instance_id"), [
    (0, None, None), (1, "intent", None), (2, "created", 7), (3, "destroying", 7), (4, "gone", 7),
])  # fmt: skip
def test_a_kill_after_each_step_leaves_that_step_and_a_free_lock(tmp_path, steps, state, instance_id):
    command = [sys.executable, "-c", STEPS, ROOT, str(tmp_path), str(steps)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"here\n"
        (seen,) = read_journals(tmp_path)
        assert seen.owner_alive
        process.send_signal(signal.SIGKILL)
        process.wait()
    (seen,) = read_journals(tmp_path)
    assert not seen.owner_alive
    assert [(one.state, one.instance_id) for one in seen.entries.values()] == ([(state, instance_id)] if state else [])
    heir = Journal.adopt(seen.path, role="settle", at=6.0)
    assert heir is not None and bool(heir.open_entries()) == (state in ("intent", "created", "destroying"))
    heir.close()


def test_a_child_process_does_not_inherit_the_lock(tmp_path):
    journal = start(tmp_path)
    journal.intent(entry())
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        os.close(journal._fd)
        until = time.monotonic() + 10
        while read_journals(tmp_path)[0].owner_alive:  # between fork and exec the child still has it
            assert time.monotonic() < until
            time.sleep(0.005)
    finally:
        child.stdin.close()
        child.wait()


@pytest.mark.parametrize(("text", "ours", "prefixed"), [
    ("ppsmoke-3f2a-0-9c1d77aa-1800000000", True, True), ("ppsmoke-77aa55cc-12-1b2c3d4e-1800000000", True, True),
    ("ppsmoke2-3f2a-0-9c1d77aa-1800000000", False, False), ("ppsmoke", False, False), ("ppsmoke-", False, True),
    ("ppsmoke-3f2a-0-9c1d-1800000000", False, True), ("ppsmoke-3f2a-0-9c1d77aa-1800000000x", False, True),
    ("xppsmoke-3f2a-0-9c1d77aa-1800000000", False, False), ("ppsmoke-3f2a-0-9c1d77aa-1800000000\n", False, True),
    ("", False, False), (None, False, False), ("train-7b", False, False),
])  # fmt: skip
def test_only_a_whole_label_of_our_form_is_ours(text, ours, prefixed):
    label = Label.parse(text)
    assert (label is not None) == ours and has_prefix(text) == prefixed
    assert label is None or str(label) == text


def test_a_label_is_fresh_short_and_expires_after_its_grace():
    one, other = (Label.fresh("77aa55cc", 1, expires_at=1_800_000_000.9) for _ in range(2))
    assert one != other and len(str(one)) <= 60
    assert not one.expired(1_800_000_300) and one.expired(1_800_000_301)
    with pytest.raises(ValueError):
        Label.fresh("not a run", 0, expires_at=1_800_000_000)
