"""Plain sockets before they are links: connecting, listening, reading to the byte, and errors in words."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.errors import DeadlineExceeded, FrameError, LinkError
from ppsmoke.waiting import Deadline

USER_TIMEOUT_MS = 20_000
NOTSENT_LOWAT_BYTES = 128 << 10
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# bbr, which some hosts have as their default, paces the first packets after an idle gap over a part of a round trip.
CONGESTION_CONTROLS = ("cubic", "reno")


class RawSocket:
    """A socket that is ours to close until somebody has taken it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._ours = True

    def hand_over(self) -> socket.socket:
        self._ours = False
        return self.socket

    def close(self) -> None:
        if self._ours:
            self.socket.close()


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound, listening, non-blocking. Raises LinkError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise LinkError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint="is another node running there?"
        ) from error
    sock.setblocking(False)
    choose_congestion_control(sock)
    return sock


def choose_congestion_control(sock: socket.socket) -> None:
    """For a connection that has not begun, since one that began with bbr goes on pacing; accepted sockets have their
    listener's. Nothing where the system leaves no choice."""
    option = getattr(socket, "TCP_CONGESTION", None)
    for name in CONGESTION_CONTROLS if option is not None else ():
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, name.encode())
        except OSError:  # not built into this kernel, or not for everybody
            continue
        return


def stream_socket(family: int) -> socket.socket:
    """A non-blocking TCP socket, for loop.sock_connect."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    choose_congestion_control(sock)
    return sock


def reusing_socket(family: int, port: int) -> socket.socket:
    """A non-blocking TCP socket bound to that local port (0: a fresh one) that others can be bound to as well."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        choose_congestion_control(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):  # macOS needs it, Linux takes either
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        return sock
    except BaseException:
        sock.close()
        raise


def tune(sock: socket.socket) -> None:
    """Options of a link's socket; what this system lacks is left out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_USER_TIMEOUT": USER_TIMEOUT_MS, "TCP_NOTSENT_LOWAT": NOTSENT_LOWAT_BYTES, **_KEEPALIVE}
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def connect(candidate: Candidate, open_socket: Callable[[int], socket.socket]) -> socket.socket:
    """A socket of open_socket(address family) that is connected there. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(candidate.host, candidate.tcp_port, type=socket.SOCK_STREAM)
    family, address = found[0][0], found[0][4]
    sock = open_socket(family)
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Raises FrameError if the connection ends before."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise FrameError("hung up within the preamble", reason="hung-up")
        data += more
    return data


async def within(seconds: float, coroutine: Coroutine[Any, Any, Any], *, name: str, doing: str) -> Any:
    """The coroutine's result; whatever the network did to it becomes a LinkError."""
    try:
        return await Deadline.after(seconds).wait(coroutine, doing=doing)
    except DeadlineExceeded as error:
        raise LinkError(f"{name}: {doing} within {seconds:g} s") from error
    except socket.gaierror as error:
        raise LinkError(f"{name}: no such host ({error.strerror})") from error
    except UnicodeError as error:
        raise LinkError(f"{name}: no name of a host") from error
    except OSError as error:  # asyncio puts its own words in strerror
        raise LinkError(f"{name}: {os.strerror(error.errno) if error.errno else error}") from error
