"""Sockets before they are links: what is chosen for them while it can be chosen."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ppsmoke.cluster import raw_sockets
from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.raw_sockets import reusing_socket, stream_socket

NEEDS_OPTION = pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system leaves no choice")


class ChoosySocket:
    """A socket of a system that has, or allows, these congestion controls alone."""

    def __init__(self, *allowed: str) -> None:
        self.allowed, self.chosen = allowed, "the default"

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if value.decode() not in self.allowed:
            raise FileNotFoundError(value)
        self.chosen = value.decode()


@NEEDS_OPTION
@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [(("bbr", "reno", "cubic"), "cubic"), (("bbr", "reno"), "reno"), (("bbr",), "the default")],
)
def test_a_connection_begins_with_cubic_or_else_with_reno_whatever_the_default_is(allowed, chosen):
    sock = ChoosySocket(*allowed)
    raw_sockets.choose_congestion_control(sock)
    assert sock.chosen == chosen


@NEEDS_OPTION
def test_every_socket_of_a_link_has_chosen_before_its_connection_began(monkeypatch):
    def control(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    async def scenario() -> list[bytes]:
        listening = raw_sockets.listening_socket("127.0.0.1", 0)
        host, port = listening.getsockname()
        dialled = await raw_sockets.connect(Candidate("host", host, port, None), stream_socket)
        accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
        ends = [listening, dialled, accepted, reusing_socket(socket.AF_INET, 0)]
        try:
            return [control(end) for end in ends]
        finally:
            for end in ends:
                end.close()

    # Not the first choice, which is the default of many systems: there nothing chosen would look the same.
    monkeypatch.setattr(raw_sockets, "CONGESTION_CONTROLS", ("reno",))
    assert asyncio.run(scenario()) == [b"reno"] * 4
