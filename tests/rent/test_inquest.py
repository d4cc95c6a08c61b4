"""A node without a link: the boot beside it tells within seconds that it has ended, and how; a living one is let be."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time

import pytest

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.errors import StageError
from ppsmoke.rent import inquest as inquest_module
from ppsmoke.rent.fleet import StageSpec
from ppsmoke.rent.inquest import Inquest
from ppsmoke.rent.push import BootStatus, build_payload, push
from ppsmoke.waiting import Deadline, running
from tests.lab.small_container import PATIENCE_S, SECRET, Container, container, zipapp_of_fake_node

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a rented container is Linux")
PAYLOAD = build_payload("{}", zipapp_of_fake_node())
HEARD_WITHIN_S = 3.0


def told_of(port: int, said: list[str] | None = None) -> tuple[Inquest, str]:
    """An inquest that knows of one node, and the node's id. said: takes what it says."""
    identity = RunAuthority(bytes(32)).mint("stage-1-of-2")
    spec = StageSpec(stage=1, generation=0, identity=identity, environment={}, boot_secret=SECRET)
    lines = [] if said is None else said
    inquest = Inquest(lambda text, stage: lines.append(f"{stage}: {text}"))
    inquest.started(Endpoint(identity.role, 0, identity.node_id, "127.0.0.1", port, None), spec)
    return inquest, identity.node_id


def start_node(it: Container) -> int:
    """Push it and wait until it runs; its pid."""
    asyncio.run(push("127.0.0.1", it.port, SECRET, PAYLOAD, deadline=Deadline.after(20), stage=1))
    return it.node()["pid"]


@pytest.mark.slow
def test_a_killed_node_is_heard_of_within_seconds_with_how_and_its_last_output(tmp_path):
    with container(tmp_path) as it:
        pid = start_node(it)

        async def story() -> tuple[StageError, float]:
            inquest, node_id = told_of(it.port)
            inquest.link_changed(node_id, up=True)
            watching = asyncio.ensure_future(inquest.watch())
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            inquest.link_changed(node_id, up=False)
            with pytest.raises(StageError) as caught:
                await asyncio.wait_for(watching, PATIENCE_S)
            return caught.value, time.monotonic() - killed_at

        error, heard_s = asyncio.run(story())
    assert error.stage == 1 and error.cause == "its node was killed by SIGKILL: node: I am up?[2J"
    assert "memory" in error.hint and "node: I am up" in error.detail
    assert heard_s < HEARD_WITHIN_S


@pytest.mark.slow
def test_a_node_that_ends_before_it_was_ever_linked_is_asked_after_too(tmp_path, monkeypatch):
    monkeypatch.setattr(inquest_module, "FIRST_LINK_S", 0.1)
    with container(tmp_path) as it:
        start_node(it)
        (it.folder / "node-exit").write_text("3")
        it.says("the node ended with status 3")

        async def story() -> None:
            inquest, _ = told_of(it.port)
            await asyncio.wait_for(inquest.watch(), PATIENCE_S)

        with pytest.raises(StageError, match="its node ended with status 3: node: my last words"):
            asyncio.run(story())


def test_a_link_that_flaps_proves_nothing_and_nobody_asks_once_it_is_up_again(monkeypatch):
    """A listener that says nothing is what a living node looks like to who asks its boot."""
    monkeypatch.setattr("ppsmoke.rent.push.GREETING_S", 0.05)
    monkeypatch.setattr(inquest_module, "AGAIN_S", 0.01)
    monkeypatch.setattr(inquest_module, "STILL_S", 0.05)
    said: list[str] = []
    peers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as node:
        node.settimeout(5.0)

        async def story() -> None:
            inquest, node_id = told_of(node.getsockname()[1], said)
            async with running(inquest.watch(), name="watch") as watching:
                inquest.link_changed("another node", up=False)  # the orchestrator's own, say
                inquest.link_changed(node_id, up=True)
                inquest.link_changed(node_id, up=False)
                while len(said) < 2:  # asked, and asked again
                    peers.append((await asyncio.to_thread(node.accept))[0])
                inquest.link_changed(node_id, up=True)
                node.settimeout(0.0)
                await asyncio.sleep(0.1)
                backlog = 0
                while True:
                    try:
                        peers.append(node.accept()[0])
                    except BlockingIOError:
                        break
                    backlog += 1
                assert backlog <= 1 and not watching.done()

        asyncio.run(story())
    for peer in peers:
        peer.close()
    first, *still, last = said
    assert first == "1: the link to its node is down; asking the boot beside it"
    assert still and all(re.match(r"1: no link to its node .*: connected, but nothing greets\)", one) for one in still)
    assert last == "1: its node is linked again"


@pytest.mark.parametrize(("code", "tail", "cause"), [
    (-9, '{"status": "listening", "node_id": "0", "tcp_port": 7070}\n', "its node was killed by SIGKILL"),
    (-99, "", "its node was killed by signal 99"),
    (1, "node | fatal: no CUDA device\n", "its node ended with status 1: node | fatal: no CUDA device"),
    (None, "OSError(28)", "its node could not be run: OSError(28)"),
])  # fmt: skip
def test_how_a_node_ended_is_said_in_words(code, tail, cause, monkeypatch):
    said = BootStatus.read(b'{"state": "ended", "exit": %s, "tail": "%s"}' % (
        b"null" if code is None else str(code).encode(), tail.replace('"', '\\"').replace("\n", "\\n").encode()
    ))  # fmt: skip

    async def answers(*args, **kwargs) -> BootStatus:
        return said

    monkeypatch.setattr(inquest_module, "ask_boot", answers)

    async def story() -> None:
        inquest, node_id = told_of(1)
        inquest.link_changed(node_id, up=False)
        await asyncio.wait_for(inquest.watch(), PATIENCE_S)

    with pytest.raises(StageError) as caught:
        asyncio.run(story())
    assert caught.value.cause == cause
