"""Holes: sockets that open simultaneously, and whole nodes that end on a punched path. Loopback, deaf to RSTs."""

from __future__ import annotations

import asyncio
import functools
import random
import socket
import sys

import pytest

from ppsmoke.cluster import punching
from ppsmoke.cluster.paths import Mapping
from ppsmoke.cluster.punch import punch
from ppsmoke.cluster.raw_sockets import reusing_socket
from ppsmoke.cluster.rendezvous import _Attempt
from ppsmoke.errors import FrameError, LinkError
from tests.lab.cluster import endpoint_of, lab, run, until, within
from tests.lab.deaf_socket import DeafMachine, deaf_socket
from tests.lab.hidden import dialled_stages, hidden, hidden_stages, info, until_path

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's socket filters")


async def anybody(sock: socket.socket) -> None:
    """Whoever is there is the peer."""


def free_port() -> tuple[socket.socket, int]:
    """A port that is ours as long as the socket is open: bound, and nobody listens."""
    sock = reusing_socket(socket.AF_INET, 0)
    return sock, sock.getsockname()[1]


@linux
@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_two_ends_open_simultaneously_the_late_one_finds_the_early_one_waiting(late_s):
    async def scenario():
        (hold_one, one_port), (hold_other, other_port) = free_port(), free_port()
        punched = functools.partial(punch, confirm=anybody, open_socket=deaf_socket)
        early = asyncio.ensure_future(punched(one_port, [("127.0.0.1", other_port)], rng=random.Random(1)))
        await asyncio.sleep(late_s)
        late = punched(other_port, [("127.0.0.1", one_port)], rng=random.Random(2))
        one, other = await within(asyncio.gather(early, late))
        loop = asyncio.get_running_loop()
        await within(loop.sock_sendall(one.socket, b"through"))
        assert await within(loop.sock_recv(other.socket, 100)) == b"through"
        for sock in (one, other, hold_one, hold_other):
            sock.close()

    run(scenario())


def test_a_refused_attempt_is_repeated_from_the_same_port():
    async def scenario():
        hold, port = free_port()
        server = reusing_socket(socket.AF_INET, 0)
        sources = []
        punched = asyncio.ensure_future(
            punch(port, [("127.0.0.1", server.getsockname()[1])], anybody, rng=random.Random(1))
        )
        await asyncio.sleep(0.1)  # refused a few times by now: bound, and nobody listens
        server.listen()
        raw = await within(punched)
        accepted, source = await within(asyncio.get_running_loop().sock_accept(server))
        sources.append(source[1])
        assert sources == [port]
        for sock in (raw, accepted, server, hold):
            sock.close()

    run(scenario())


def test_whoever_answers_and_is_not_the_peer_is_left_and_the_peer_is_taken():
    async def scenario():
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        stranger, peer = (server.getsockname() for server in servers)
        hold, port = free_port()

        async def confirm(sock: socket.socket) -> None:
            if sock.getpeername() == stranger:
                raise FrameError("somebody else is at the other end of the punched connection")

        raw = await within(punch(port, [stranger, peer], confirm, rng=random.Random(1)))
        assert raw.socket.getpeername() == peer
        raw.close()
        hold_fresh, fresh_port = free_port()  # the four numbers of an old connection stay in use for a while
        with pytest.raises(LinkError, match="somebody else is at the other end"):
            await within(punch(fresh_port, [stranger], confirm, rng=random.Random(1)))
        for sock in (*servers, hold, hold_fresh):
            sock.close()

    run(scenario())


@linux
def test_two_hidden_nodes_start_relayed_and_end_on_a_hole():

    async def scenario():
        async with lab() as cluster:
            orchestrator, *stages = await hidden_stages(cluster, machine=DeafMachine())
            await within(stages[1].send(stages[0].address("box"), b"over the relay"))
            await until_path(*stages, "punched")
            assert info(*stages).reason == "was relayed" and info(*stages).via == ""
            await within(stages[1].send(stages[0].address("box"), b"through the hole"))
            received = [(await within(stages[0].mailbox("box").receive())).payload for _ in range(2)]
            assert received == [b"over the relay", b"through the hole"]
            await until(lambda: not orchestrator.relayed(), doing="the end of the legs")
            assert orchestrator._reaching.rendezvous.counts["arranged"] == 1

    run(scenario())


def test_a_port_that_moves_per_destination_keeps_the_link_relayed_and_the_reason_is_shown(monkeypatch):
    real = _Attempt.mapping

    def moved(self: _Attempt, node_id: str) -> Mapping:
        mapping = real(self, node_id)
        return Mapping(mapping.local_port, mapping.first, (mapping.first[0], mapping.first[1] + 1))

    monkeypatch.setattr(_Attempt, "mapping", moved)

    async def scenario():
        async with lab() as cluster:
            _, *stages = await hidden_stages(cluster)
            await within(stages[0].send(stages[1].address("box"), b"over the relay"))
            for one, other in (stages, stages[::-1]):
                await until(lambda one=one, other=other: "no hole" in info(one, other).reason)
                assert "uses another port per destination" in info(one, other).reason
                assert info(one, other).path == "relayed"

    run(scenario())


def test_whom_the_relay_dials_nobody_can_punch_and_the_reason_is_shown():
    async def scenario():
        async with lab() as cluster:
            _, *stages = await dialled_stages(cluster)
            await within(stages[0].send(stages[1].address("box"), b"over the relay"))
            asker = min(stages, key=lambda node: node.node_id)
            other = max(stages, key=lambda node: node.node_id)
            await until(lambda: "does not dial the relay" in info(asker, other).reason)

    run(scenario())


def test_a_hole_that_nobody_comes_through_leaves_the_relay_as_it_was(monkeypatch):
    async def nobody(*args, **kwargs):
        raise LinkError("nobody came through the hole")

    monkeypatch.setattr(punching, "punch", nobody)

    async def scenario():
        async with lab() as cluster:
            relay = await cluster.node("orchestrator")
            stages = [await hidden(cluster, f"stage-{index}-of-2") for index in (0, 1)]
            for stage in stages:
                await within(stage.dial(endpoint_of(relay)))
            await within(stages[0].send(stages[1].address("box"), b"over the relay"))
            await until(lambda: "nobody came through the hole" in info(*stages).reason)
            assert info(*stages).path == "relayed"

    run(scenario())
