"""What we may owe money for, on disk before it can exist: one journal per run, locked by whoever answers for it.

`$XDG_STATE_HOME/ppsmoke/journal/<run>.jsonl`: a JSON record a line, appended and fsynced; a held lock on the file means
that its owner lives. The state is a pure fold over the records; a torn last line costs that record alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ppsmoke.errors import RentError
from ppsmoke.rent.labels import Label

State = Literal["intent", "created", "destroying", "gone", "refused"]
CLOSED: frozenset[str] = frozenset({"gone", "refused"})  # nothing is owed for these
_STATES = frozenset({"intent", "created", "destroying", *CLOSED})
_RUN_ID = re.compile(r"[0-9a-z]{4,20}")
LOCK_TRIES, LOCK_RETRY_S = 4, 0.01
MAX_JOURNAL_BYTES = 16 << 20  # a run writes some hundred bytes per instance and step


class LedgerError(RentError):
    """The journal cannot be kept, so nothing may be rented."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One create call and what became of it. `instance_id` is None while nobody knows whether there is an instance."""

    label: str
    state: State
    stage: int = 0
    account: str = ""  # whose bill it is on; only that account can say that it is gone
    instance_id: int | None = None
    offer_id: int | None = None
    machine_id: int | None = None
    dph: float = 0.0
    intent_at: float = 0.0  # seconds since 1970, like created_at
    created_at: float | None = None
    why: str = ""  # of the last record

    @property
    def open(self) -> bool:
        return self.state not in CLOSED


def fold(records: Iterable[Mapping[str, Any]]) -> dict[str, Entry]:
    """The entries by label, in the order of their intents. The last record of a label decides its state; an id, once
    known, stays known. Records of no known kind are passed over: a newer version may have written them."""
    entries: dict[str, Entry] = {}
    for record in records:
        label, state = record.get("label"), record.get("state")
        if isinstance(label, str) and state in _STATES:
            before = entries.get(label) or Entry(label=label, state="intent", intent_at=_float(record, "at") or 0.0)
            entries[label] = _apply(before, record)
    return entries


def _apply(entry: Entry, record: Mapping[str, Any]) -> Entry:
    state = record["state"]
    changes: dict[str, Any] = {"state": state, "why": str(record.get("why", ""))}
    for name in ("stage", "instance_id", "offer_id", "machine_id"):
        if isinstance(value := record.get(name), int):
            changes[name] = value
    if isinstance(account := record.get("account"), str):
        changes["account"] = account
    if (dph := _float(record, "dph")) is not None:
        changes["dph"] = dph
    if state == "created" and entry.created_at is None:
        changes["created_at"] = _float(record, "at")
    return replace(entry, **changes)


def _float(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The records in a journal's bytes and how many lines are damaged. A last line without its end was never finished
    and is no damage: what it was to say had not happened yet, or will be found out again."""
    lines = data.split(b"\n")
    records, damaged = [], 0
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif index != len(lines) - 1:
            damaged += 1
    return records, damaged


class Journal:
    """One run's journal, locked by this process until `close`. The lock does not pass to child processes."""

    def __init__(self, path: Path, fd: int, entries: dict[str, Entry], damaged: int, *, torn: bool) -> None:
        self.path = path
        self.entries = entries
        self.damaged = damaged  # lines nobody can read any more
        self._fd = fd
        self._torn = torn  # the file does not end with a line's end

    @property
    def run_id(self) -> str:
        return self.path.stem

    @classmethod
    def start(cls, folder: Path, run_id: str, *, at: float) -> Journal:
        """A new run's journal. Raises LedgerError when the folder or the disk cannot keep one: rent nothing then."""
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"no run id: {run_id!r}")
        path = folder / "journal" / f"{run_id}.jsonl"
        unlocked = path.with_suffix(".new")  # only a locked file gets the name that others look for
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot(path.parent, error) from None
        journal = cls(unlocked, fd, {}, 0, torn=False)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            journal._append({"owner": "run", "pid": os.getpid(), "at": at})
            os.link(unlocked, path)  # refuses to replace, as rename would not
            journal.path = path
            unlocked.unlink()
            _sync_folder(path.parent)
        except (OSError, LedgerError) as error:
            unlocked.unlink(missing_ok=True)
            journal._discard()
            raise error if isinstance(error, LedgerError) else _cannot(path, error) from None
        return journal

    @classmethod
    def adopt(cls, path: Path, *, role: str, at: float) -> Journal | None:
        """Take over a journal whose owner is dead; None if the owner lives, or the file has meanwhile been settled."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _cannot(path, error) from None
        try:
            owned = _try_lock(fd) and os.fstat(fd).st_nlink > 0  # no name: settled between our open and our lock
            data = _read_all(fd) if owned else b""
        except OSError as error:
            os.close(fd)
            raise _cannot(path, error) from None
        if not owned:
            os.close(fd)
            return None
        records, damaged = parse(data)
        journal = cls(path, fd, fold(records), damaged, torn=bool(data) and not data.endswith(b"\n"))
        try:
            journal._append({"owner": role, "pid": os.getpid(), "at": at})
        except LedgerError:
            pass  # a full disk must not keep anybody from ending what is rented
        return journal

    def owns(self, label: Label) -> bool:
        return owns(self, label)

    def intent(self, entry: Entry) -> None:
        """Before the create call leaves. Raises LedgerError, and then the call must not be made."""
        record = {"state": "intent", "label": entry.label, "stage": entry.stage, "account": entry.account}
        record |= {"offer_id": entry.offer_id, "machine_id": entry.machine_id, "dph": entry.dph, "at": entry.intent_at}
        self._append(record)
        self.entries[entry.label] = entry

    def created(self, label: str, instance_id: int, *, at: float, why: str = "") -> None:
        """The instance exists. Remembered even where it cannot be written (LedgerError): its owner will end it."""
        self._note({"state": "created", "label": label, "instance_id": instance_id, "at": at, "why": why})

    def refused(self, label: str, why: str, *, at: float) -> None:
        """A definite no: nothing was made."""
        self._note({"state": "refused", "label": label, "at": at, "why": why})

    def destroying(self, label: str, *, at: float) -> None:
        self._note({"state": "destroying", "label": label, "at": at})

    def gone(self, label: str, how: str, *, at: float) -> None:
        """After a read that succeeded and did not find it, never before."""
        self._note({"state": "gone", "label": label, "at": at, "why": how})

    def open_entries(self) -> list[Entry]:
        """What may still cost money."""
        return [entry for entry in self.entries.values() if entry.open]

    def close(self) -> None:
        """Give up the lock. A journal with nothing open is removed first, so that no later start reads it again; one
        with damaged lines, which may have named something, is put aside under another name."""
        if self._fd < 0:
            return
        with suppress(OSError):  # a file system that has become read-only: the next start reads it once more
            if not self.open_entries() and self.damaged:
                os.replace(self.path, self.path.with_suffix(".damaged"))
            elif not self.open_entries():
                self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _discard(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _note(self, record: dict[str, Any]) -> None:
        known = self.entries.get(record["label"])
        if known is not None and known.instance_id is not None:
            record.setdefault("instance_id", known.instance_id)  # each record is enough by itself
        before = known or Entry(label=record["label"], state="intent", intent_at=record["at"])
        self.entries[record["label"]] = _apply(before, record)
        self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        data = b"\n" + line if self._torn else line
        try:
            written = os.write(self._fd, data)
            self._torn = written != len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _sync(self._fd)
        except OSError as error:
            raise _cannot(self.path, error) from None


@dataclass(frozen=True)
class JournalView:
    """One journal as another process sees it."""

    path: Path
    owner_alive: bool
    owner: str  # "run 4711", "reaper 4712", "" if no line says
    entries: Mapping[str, Entry]
    damaged: int

    @property
    def run_id(self) -> str:
        return self.path.stem


def owns(journal: Journal | JournalView, label: Label) -> bool:
    """Is this the label of one of the journal's creates? The run's id alone will do only where lines are damaged: every
    label is written down before it is used, and run ids are chosen by chance."""
    return str(label) in journal.entries or (bool(journal.damaged) and label.run_id == journal.run_id)


def read_journals(folder: Path) -> list[JournalView]:
    """Every journal of this state folder. Raises LedgerError for one that is there and cannot be read."""
    found = []
    try:
        paths = sorted((folder / "journal").glob("*.jsonl"))
    except OSError as error:
        raise _cannot(folder, error) from None
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # settled meanwhile
        except OSError as error:
            raise _cannot(path, error) from None
        try:
            alive = _is_locked(fd)
            records, damaged = parse(_read_all(fd))
        except OSError as error:
            raise _cannot(path, error) from None
        finally:
            os.close(fd)
        owners = [f"{record['owner']} {record.get('pid')}" for record in records if "owner" in record]
        found.append(JournalView(path, alive, owners[-1] if owners else "", fold(records), damaged))
    return found


def _try_lock(fd: int) -> bool:
    """Take the lock if nobody owns it; whoever just looks (`_is_locked`) holds it for microseconds."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_RETRY_S)
    return False


def _is_locked(fd: int) -> bool:
    """Does somebody hold the lock? A shared one is tried, so that two who look do not see each other."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > MAX_JOURNAL_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return os.pread(fd, size, 0)


def _sync(fd: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive's cache
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cannot(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"cannot keep the journal of what is rented: {path}: {error.strerror or error}",
        phase="rent",
        hint="make room, or set XDG_STATE_HOME to a folder that can be written",
    )
