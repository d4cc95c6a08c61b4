"""What the tests of a container's boot share: a push as the run makes it, and what is asked of a boot."""

from __future__ import annotations

import asyncio
import socket

from ppsmoke.rent.push import BootStatus, PushReport, ask_boot, build_payload, push
from ppsmoke.waiting import Deadline
from tests.lab.small_container import SECRET, Container, zipapp_of_fake_node

CODE = zipapp_of_fake_node()
PAYLOAD = build_payload('{"ca": "Q0E=", "leaf": "TEVBRg=="}', CODE)


def push_to(
    it: Container,
    payload: bytes = PAYLOAD,
    *,
    secret: bytes = SECRET,
    within_s: float = 20.0,
    seen: list[BootStatus] | None = None,
) -> PushReport:
    """The push, to its end; every record of the boot is added to `seen`."""
    deadline = Deadline.after(within_s, phase="boot")
    record = (lambda status: None) if seen is None else seen.append
    return asyncio.run(push("127.0.0.1", it.port, secret, payload, deadline=deadline, stage=1, on_status=record))


def status_of(it: Container) -> BootStatus:
    return asyncio.run(ask_boot("127.0.0.1", it.port, SECRET, deadline=Deadline.after(10)))


def end_node(it: Container, status: int = 0) -> None:
    """Have its node end by itself, with this exit status."""
    (it.folder / "node.json").unlink()
    (it.folder / "node-exit").write_text(str(status))


def listens(it: Container) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", it.port)) == 0
