"""The folder of what was downloaded: where it is, how processes take turns in it, what lies in it, how to clear it.

models/NAME holds whole files, ranges/KEY/ the pieces of a file that is read over HTTP. Nothing else is touched.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ppsmoke.errors import EnvironmentLacks, FetchError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all (0: not known)

# Called again and again while another process holds a lock; returns how far that one is, in any unit.
Waiting = Callable[[], int]

PATIENCE_S = 120.0  # with a holder that gets no further: above what a server may take that answers nothing five times
LOCK_POLL_S = 0.2  # how often a waiting process looks, and tells its own reader that it still waits
UNFINISHED_PREFIX = ".download-"  # models/.download-NAME-RANDOM: a folder while NAME is being downloaded
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/ppsmoke, or ~/.cache/ppsmoke; a relative XDG_CACHE_HOME is ignored, as its specification says."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "ppsmoke"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into a FetchError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            hint = "free some space (ppsmoke cache clear), or set XDG_CACHE_HOME to a larger disk"
            raise FetchError(f"no space left for the cache in {path}", hint=hint) from error
        raise FetchError(
            f"the cache in {path} cannot be written: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from error


def make_dir(path: Path) -> Path:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def locked(path: Path, *, waiting: Waiting) -> Iterator[None]:
    """Hold the lock file alone, once nobody else does. Raises FetchError like wait_until."""
    fd = open_lock(path)
    try:
        wait_until(lambda: try_lock(fd), waiting=waiting)
        yield
    finally:
        os.close(fd)


def open_lock(path: Path) -> int:
    if fcntl is None:
        raise EnvironmentLacks("this system has no file locks", hint="on Windows, use WSL")
    make_dir(path.parent)
    with writing(path.parent):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def wait_until(taken: Callable[[], bool], *, waiting: Waiting) -> None:
    """Try to take a lock until it works. The kernel frees a dead holder's; raises FetchError if a living one does
    not get on."""
    seen, changed_at = -1, time.monotonic()
    while not taken():
        measure = waiting()
        if measure != seen:
            seen, changed_at = measure, time.monotonic()
        elif time.monotonic() - changed_at > PATIENCE_S:
            cause = f"another process holds what is needed in {cache_dir()} and got no further in {PATIENCE_S:g} s"
            raise FetchError(cause, hint="end that process and try again")
        time.sleep(LOCK_POLL_S)


def try_lock(fd: int) -> bool:
    return _taken(fd, fcntl.LOCK_EX)


def share_lock(fd: int) -> bool:
    """Hold it together with other readers."""
    return _taken(fd, fcntl.LOCK_SH)


def _taken(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_range(fd: int, start: int, length: int) -> bool:
    """Take bytes of a file for this process alone."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def free_range(fd: int, start: int, length: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_UN, length, start)


@dataclass(frozen=True)
class Entry:
    """Something in the cache; bytes is what it takes on the disk (a file with holes takes less than its length)."""

    name: str
    path: Path
    bytes: int


def entries() -> list[Entry]:
    """What lies in the cache, the largest first; an empty list if there is none."""
    found = [
        Entry(path.name, path, _disk_bytes(path))
        for folder in ("models", "ranges", "kernels")
        for path in _listing(cache_dir() / folder)
        if not path.name.startswith(".") or path.name.startswith(UNFINISHED_PREFIX)
    ]
    return sorted(found, key=lambda entry: (-entry.bytes, entry.name))


def clear() -> tuple[int, list[Entry]]:
    """Remove all that no process uses. Returns the bytes freed and the entries that are left, being in use."""
    freed, left = 0, []
    for entry in entries():
        if _remove(entry):
            freed += entry.bytes
        else:
            left.append(entry)
    return freed, left


def sweep() -> None:
    """Remove what a download left that was killed. Never raises: whoever downloads next removes it too."""
    for path in _listing(cache_dir() / "models"):
        if path.name.startswith(UNFINISHED_PREFIX):
            with suppress(OSError, FetchError):
                _remove(Entry(path.name, path, 0))


def lock_path(entry: Path) -> Path:
    """The lock of a cache entry: beside it, so that removing the entry leaves the lock to those who wait for it."""
    name = entry.name
    if name.startswith(UNFINISHED_PREFIX):  # the download holds the lock of what it will become
        name = name.removeprefix(UNFINISHED_PREFIX).rpartition("-")[0]
    return entry.parent / f".{name}.lock"


def _remove(entry: Entry) -> bool:
    fd = open_lock(lock_path(entry.path))
    try:
        if not try_lock(fd):
            return False
        with writing(entry.path):
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _disk_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [Path(base, name) for base, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        try:
            total += file.stat().st_blocks * 512  # stat(2): always 512, whatever the block size
        except OSError:
            continue  # gone since it was listed
    return total


def folder_bytes(folder: Path) -> int:
    """The length of all files below a folder, of those that have not gone meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total
