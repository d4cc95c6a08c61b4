"""The UDP sockets of a node: the port that it listens on, and a fresh one beside it while that gets no answers.

A mapping can be dead and stay so: after a container's restart datagrams go to the old one, or come back with a
rewritten source, and every packet from the same port keeps the stale entry alive. facts/network.md, 6.22.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ppsmoke.errors import LinkError

UdpAddress = tuple[str, int]
Port = asyncio.DatagramTransport

MAX_UNSENT_BYTES = 64 << 10  # datagrams are dropped, never queued: a late one is worse than a lost one
FRESH_EVERY_S = 30.0  # a fresh port that did not help is not followed by another at once


class UdpPorts:
    """take(data, source, port): what came to one of them. Silent once closed."""

    def __init__(self, take: Callable[[bytes, UdpAddress, Port], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._address: UdpAddress | None = None
        self._fresh_at: float | None = None
        self._opening: asyncio.Task[None] | None = None
        self.listening: Port | None = None
        self.fresh: Port | None = None

    async def open(self, address: UdpAddress) -> None:
        """Listen. Raises LinkError if the address cannot be had."""
        try:
            self.listening = await self._open(address)
        except OSError as error:
            host, port = address
            raise LinkError(
                f"cannot listen on UDP {host}:{port}: {error}", hint="choose another port, or one of this machine"
            ) from error
        self._address = address

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.wait({self._opening})  # a socket, no network: at once
        for port in (self.listening, self.fresh):
            if port is not None:
                port.close()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn

    @property
    def number(self) -> int | None:
        """Of the port that it listens on."""
        return None if self.listening is None else self.listening.get_extra_info("sockname")[1]

    def send(self, datagram: bytes, address: UdpAddress, port: Port | None) -> bool:
        """From that port, or from the one that it listens on, if that port is no more. False: dropped."""
        if port is None or port.is_closing():
            port = self.listening
        if port is None or port.is_closing() or port.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        port.sendto(datagram, address)
        return True

    def want_fresh(self) -> None:
        """Have a fresh port soon, in place of the fresh one that there may be."""
        now = self._loop.time()
        early = self._fresh_at is not None and now - self._fresh_at < FRESH_EVERY_S
        if self._address is not None and not early and (self._opening is None or self._opening.done()):
            self._fresh_at = now
            self._opening = asyncio.ensure_future(self._open_fresh(self._address[0]))
            self._opening.set_name("fresh UDP port")

    async def _open_fresh(self, host: str) -> None:
        try:
            fresh = await self._open((host, 0))
        except OSError:
            return  # no sockets left: then the old one has to do
        if self.fresh is not None:
            self.fresh.close()
        self.fresh = fresh

    async def _open(self, address: UdpAddress) -> Port:
        port, _ = await self._loop.create_datagram_endpoint(lambda: _Datagrams(self._take), local_addr=address)
        return port


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, take: Callable[[bytes, UdpAddress, Port], None]) -> None:
        self._take = take
        self._port: Port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._port = transport  # type: ignore[assignment]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._take(data, addr[:2], self._port)

    def error_received(self, exc: Exception) -> None:
        """ICMP says that nobody listens there; silence says the same, and is judged by the core."""
