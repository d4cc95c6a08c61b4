"""The first code of a worker process: it takes fd 0 and 1 for the protocol before anything heavy is imported.

Spawned by pipeline/bridge.py through `entry`; `python -m ppsmoke.worker` calls `take_stdio` itself. Standard library
only: the node's process imports this module too.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import BinaryIO

DEFAULT_TARGET = "ppsmoke.worker.__main__:serve"
ORPHAN_GRACE_S = 1.0  # an idle worker leaves at the end of its input within 25 ms; a computing one is killed after this
_PARENT_CHECK_S = (
    2.0  # where the end of a pipe does not wake poll (macOS with no events asked for), the parent's pid tells
)
_FIRST_FREE_FD = 10  # above anything that dup2 to 0, 1 and 2 could overwrite


def entry(
    requests: Connection, replies: Connection, errors: Connection, target: str, environment: Mapping[str, str]
) -> None:
    """The spawn child's main: the three pipe ends become fd 0, 1 and 2, and `target` ("module:function") is served.

    environment replaces the inherited one as a whole. Leads its own session, so that the whole family can be ended
    by group; a terminal's Ctrl-C never reaches it: its end is the end of its input.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the bridge starts us with it blocked
    parent = os.getppid()
    # Our copy of the node's own stdout, until we end: who reads it to its end knows that we are gone too.
    _high_copy(1)
    high = [_high_copy(end.fileno()) for end in (requests, replies, errors)]  # an end may itself be 0, 1 or 2
    for end in (requests, replies, errors):
        end.close()
    for source, fd in zip(high, (0, 1, 2), strict=True):
        os.dup2(source, fd)
        os.close(source)
    os.setsid()
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(_serve(target, *take_stdio(), parent=parent))


def take_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's two streams (requests, replies), taken off fd 0 and 1 for good.

    From here on fd 0 is /dev/null and fd 1 is stderr, for Python, C and every child alike: a stray print cannot
    corrupt the protocol. The replies are unbuffered; a raw write may be short, so write through `write_all`.
    """
    requests, replies = _high_copy(0), _high_copy(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing > 2:
        os.close(nothing)
    os.dup2(2, 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    return open(requests, "rb", buffering=1 << 20), open(replies, "wb", buffering=0)


def write_all(replies: BinaryIO, data: bytes) -> None:
    """Every byte of data, through a raw stream whose write may take only a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[replies.write(rest) or 0 :]


def _serve(target: str, requests: BinaryIO, replies: BinaryIO, *, parent: int) -> int:
    watch = threading.Thread(
        target=_end_with_parent, args=(requests.fileno(), parent), name="orphan watch", daemon=True
    )
    watch.start()
    module, _, function = target.partition(":")
    try:
        serve = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a broken installation raises: it must reach the person, not only our stderr
        traceback.print_exc()
        failure = {"kind": "import", "message": f"{target} cannot be imported: {error}", "hint": ""}
        write_all(replies, json.dumps({"status": "failed", "error": failure}).encode() + b"\n")
        return 1
    status = serve(requests, replies)
    # Our node may be gone, and then nobody else ends what we have started; ourselves we go with our own status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    return status


def _end_with_parent(fd: int, parent: int) -> None:
    """Wait for the other end of our input to close, or for the parent to go, and end the session a little later.

    A worker that computes does not look at its input, and a signal to it alone would leave its compilers behind:
    seen in both cases. POLLHUP comes although unread input is left, and needs no reader.
    """
    poll = select.poll()
    poll.register(fd, 0)
    while not poll.poll(_PARENT_CHECK_S * 1000) and os.getppid() == parent:
        pass
    threading.Event().wait(ORPHAN_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _high_copy(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
