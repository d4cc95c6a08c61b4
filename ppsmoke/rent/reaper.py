"""A small process that outlives us: if the run is killed, it ends what the run's journal still owns.

Started before the first create, in a session of its own, deaf to the signals that end a terminal. It gets what it
needs, the key among it, over its stdin and then waits there: a line `done` says that all is gone; an end of file
without it means that the run is dead.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ppsmoke.errors import RentError
from ppsmoke.rent.api_key import ApiKey, child_environment
from ppsmoke.rent.clock import RealClock
from ppsmoke.rent.destroy import end_run
from ppsmoke.rent.ledger import Journal
from ppsmoke.rent.outcome import Outcome
from ppsmoke.rent.vast_api import VastApi

ARMED = b"armed\n"
ARM_WITHIN_S = 20.0  # starting Python on a busy machine
ATTEMPT_S, PERSIST_S = 120.0, 1800.0  # each attempt at the account, and how long it goes on trying
PAUSE_S = 20.0
LOCK_WAIT_S = 30.0  # a killed owner's lock is free at once, unless the kernel is still dumping its core
MAX_ORDER_BYTES = 1 << 16
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from ppsmoke.rent.reaper import main; sys.exit(main())"


class Reaper:
    """The run's side of it. One per run, from before the first create to the last confirmation."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def start(cls, journal: Journal, *, key: ApiKey, url: str, account: str) -> Reaper:
        """Start it and wait until it says that it is armed. Raises RentError: rent nothing without it."""
        root = str(Path(__file__).absolute().parents[2])  # the folder, or the zipapp, that holds the package
        log = journal.path.with_suffix(".reaper.log")
        order = {"key": key.reveal(), "url": url, "account": account, "journal": str(journal.path.absolute())}
        try:
            with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log_file:
                process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, root],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    env=child_environment(),
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            raise RentError(f"cannot start the reaper: {error.strerror}", phase="rent") from None
        reaper = cls(process)
        try:
            _stream(process.stdin).write(json.dumps(order).encode() + b"\n")
            _stream(process.stdin).flush()
            armed = _first_line(_stream(process.stdout), ARM_WITHIN_S)
        except OSError:
            armed = b""
        if armed != ARMED:
            reaper._give_up()
            raise RentError(f"the reaper did not start; see {log}", phase="rent")
        return reaper

    def dismiss(self, *, within_s: float = 5.0) -> None:
        """All is gone: tell it so and wait for its end. Never raises."""
        try:
            _stream(self._process.stdin).write(b"done\n")
            _stream(self._process.stdin).close()
            self._process.wait(within_s)
        except (OSError, subprocess.TimeoutExpired):
            pass  # it finds a journal with nothing open, and ends
        finally:
            _stream(self._process.stdout).close()

    def leave(self) -> None:
        """Something is left over: let it go on alone, once our journal's lock is given up."""
        for stream in (self._process.stdin, self._process.stdout):
            try:
                _stream(stream).close()
            except OSError:
                pass
        self._process.returncode = 0  # it is not ours to wait for any more

    def _give_up(self) -> None:
        self._process.kill()
        self._process.wait()
        self.leave()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise OSError("no pipe")
    return stream


def _first_line(stream: IO[bytes], within_s: float) -> bytes:
    """The first line, b"" if none came in time."""
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(within_s)
    return lines[0] if lines else b""


@dataclass(frozen=True)
class Order:
    """What the run tells its reaper."""

    key: ApiKey
    url: str
    account: str
    journal: Path

    @classmethod
    def read(cls, line: bytes) -> Order:
        """Raises ValueError for anything but an order."""
        order = json.loads(line)
        if not isinstance(order, dict):
            raise ValueError("not an order")
        names = ("key", "url", "account", "journal")
        if not all(isinstance(order.get(name), str) for name in names):
            raise ValueError("an order without " + ", ".join(names))
        return cls(ApiKey(order["key"]), order["url"], order["account"], Path(order["journal"]))


def main() -> int:
    """The process itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends a whole process group ends the run, not its safety net
    line = sys.stdin.buffer.readline(MAX_ORDER_BYTES)
    if not line:
        return 2  # the run died before it said anything, so it has rented nothing
    order = Order.read(line)
    api = VastApi.open(order.key, order.url, clock=RealClock.from_environment(os.environ))
    sys.stdout.buffer.write(ARMED)
    sys.stdout.buffer.flush()
    if sys.stdin.buffer.readline() == b"done\n":
        _log_path(order).unlink(missing_ok=True)
        return 0
    _say("the run is dead; ending what it left")
    return asyncio.run(reap(api, order, say=_say))


async def reap(api: VastApi, order: Order, *, say: Callable[[str], None]) -> int:
    """Take over the journal and end what it owns; 0 when all is gone, 1 when time ran out."""
    journal = await _take_over(api, order)
    if journal is None:
        say("the journal is settled, or somebody else settles it")
        _remove_log_if_settled(order)
        return 0
    until = api.clock.now() + PERSIST_S
    outcome = Outcome()
    while True:
        outcome += await end_run(api, journal, account=order.account, within_s=ATTEMPT_S, say=say)
        if not journal.open_entries():
            break
        if api.clock.now() + PAUSE_S >= until:
            say("giving up; the next start of ppsmoke goes on")
            break
        await api.clock.sleep(PAUSE_S)
    done = not journal.open_entries()
    journal.close()
    _remove_log_if_settled(order)
    return 0 if done else 1


async def _take_over(api: VastApi, order: Order) -> Journal | None:
    until = api.clock.now() + LOCK_WAIT_S
    while order.journal.exists():
        journal = Journal.adopt(order.journal, role="reaper", at=api.clock.wall())
        if journal is not None:
            return journal
        if api.clock.now() >= until:
            return None
        await api.clock.sleep(0.2)
    return None


def _log_path(order: Order) -> Path:
    return order.journal.with_suffix(".reaper.log")


def _remove_log_if_settled(order: Order) -> None:
    if not order.journal.exists():
        _log_path(order).unlink(missing_ok=True)


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", file=sys.stderr, flush=True)
