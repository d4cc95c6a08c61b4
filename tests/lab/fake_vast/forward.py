"""Port mapping in user space: TCP and UDP, between sockets that may live in different network namespaces.

All of it runs on one event loop in a thread of its own. Compared with a kernel's NAT: a connection to a mapped port
where nobody listens is accepted and then reset, as with docker's own proxy.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
FLOW_IDLE_S = 120.0
MAX_FLOWS, MAX_PENDING = 512, 16
CALL_WITHIN_S = 10.0
_RESET = struct.pack("ii", 1, 0)

Address = tuple[str, int]
Dial = Callable[[Address], Awaitable[socket.socket]]  # where the caller comes from -> a connected socket


class LoopThread:
    """An event loop in its own thread, for callers in other threads."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fake vast.ai: ports", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(CALL_WITHIN_S)

    def close(self) -> None:
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class TcpPort:
    """What connects to `listening` is joined to what `dial` answers."""

    def __init__(self, server: asyncio.AbstractServer, joints: set[_Half]) -> None:
        self._server, self._joints = server, joints

    @classmethod
    async def open(cls, listening: socket.socket, dial: Dial) -> TcpPort:
        joints: set[_Half] = set()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Outer(dial, joints), sock=listening)
        return cls(server, joints)

    async def close(self) -> None:
        self._server.close()
        for half in list(self._joints):
            half.reset()


class _Half(asyncio.Protocol):
    """One side of a joint: what comes here leaves there, at the pace of the slower one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Half | None = None
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.other and self.other.transport:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Half closed: the other direction goes on until it ends too."""
        self.ended = True
        if self.other and self.other.transport and not self.other.transport.is_closing():
            self.other.transport.write_eof()
            if self.other.ended:
                self.other.transport.close()
                return False
        return True

    def pause_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other and self.other.transport:
            self.other.transport.close() if error is None else self.other.reset()

    def reset(self) -> None:
        if self.transport and not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()


class _Outer(_Half):
    def __init__(self, dial: Dial, joints: set[_Half]) -> None:
        super().__init__()
        self._dial, self._joints = dial, joints
        self._joining: asyncio.Task[None] | None = None
        self._early = b""  # Python 3.10 reads on although it was told to pause before its first read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._joints.add(self)
        transport.pause_reading()  # type: ignore[attr-defined]
        self._joining = asyncio.get_running_loop().create_task(self._join(transport.get_extra_info("peername")))

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            super().data_received(data)

    async def _join(self, peer: Address) -> None:
        try:
            inner = await self._dial(peer)
            half = _Half()
            half.other = self  # at once: a service may speak first
            await asyncio.get_running_loop().create_connection(lambda: half, sock=inner)
        except OSError:
            self.reset()
            return
        if self.transport is None or self.transport.is_closing():
            half.reset()
            return
        self.other = half
        half.transport.write(self._early)
        if self.ended:
            half.transport.write_eof()
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._joints.discard(self)
        super().connection_lost(error)


class UdpPort(asyncio.DatagramProtocol):
    """Datagrams to `bound` go on through a socket per sender, which `dial` answers; replies come back the same way."""

    def __init__(self, dial: Dial, *, drop: bool) -> None:
        self._dial, self._drop = dial, drop
        self._flows: dict[Address, _Flow] = {}
        self.transport: asyncio.DatagramTransport | None = None

    @classmethod
    async def open(cls, bound: socket.socket, dial: Dial, *, drop: bool = False) -> UdpPort:
        """drop: a firewall stands before the mapping."""
        loop = asyncio.get_running_loop()
        _, port = await loop.create_datagram_endpoint(lambda: cls(dial, drop=drop), sock=bound)
        return port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def datagram_received(self, data: bytes, sender: Address) -> None:
        if self._drop or (sender not in self._flows and len(self._flows) >= MAX_FLOWS):
            return
        if sender not in self._flows:
            self._flows[sender] = _Flow(self, sender, self._dial)
        self._flows[sender].forward(data)

    def error_received(self, error: OSError) -> None:
        """A sender that is gone; its flow will fall idle."""

    def forget(self, sender: Address) -> None:
        self._flows.pop(sender, None)

    async def close(self) -> None:
        for flow in list(self._flows.values()):
            flow.close()
        if self.transport:
            self.transport.abort()


class _Flow(asyncio.DatagramProtocol):
    def __init__(self, port: UdpPort, sender: Address, dial: Dial) -> None:
        self._port, self._sender = port, sender
        self._pending: list[bytes] = []
        self._transport: asyncio.DatagramTransport | None = None
        self._loop = asyncio.get_running_loop()
        self._seen = self._loop.time()
        self._idle = self._loop.call_later(FLOW_IDLE_S, self._check_idle)
        self._opening = self._loop.create_task(self._open(dial))

    async def _open(self, dial: Dial) -> None:
        try:
            inner = await dial(self._sender)
            await self._loop.create_datagram_endpoint(lambda: self, sock=inner)
        except OSError:
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        for data in self._pending:
            self._transport.sendto(data)
        self._pending.clear()

    def forward(self, data: bytes) -> None:
        self._seen = self._loop.time()
        if self._transport is not None:
            self._transport.sendto(data)
        elif len(self._pending) < MAX_PENDING:
            self._pending.append(data)

    def datagram_received(self, data: bytes, sender: Address) -> None:
        self._seen = self._loop.time()
        if self._port.transport is not None:
            self._port.transport.sendto(data, self._sender)

    def error_received(self, error: OSError) -> None:
        """Nobody listens inside; a datagram is lost, as it would be."""

    def _check_idle(self) -> None:
        idle_s = self._loop.time() - self._seen
        if idle_s >= FLOW_IDLE_S:
            self.close()
        else:
            self._idle = self._loop.call_later(FLOW_IDLE_S - idle_s, self._check_idle)

    def close(self) -> None:
        self._idle.cancel()
        self._port.forget(self._sender)
        if self._transport is not None:
            self._transport.abort()
