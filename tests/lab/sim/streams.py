"""Simulated TCP sockets: what the product calls on a socket, over pipes that keep order and deliver late or not at all.

Modelled: SYN and its repetition, RST and silence, simultaneous opening, FIN, loss as delay, a cut that lasts (the
sender is told after TCP_USER_TIMEOUT), acknowledgements that do not come back, a receiver that does not read (window).
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.lab.sim.network import BANDWIDTH_BYTES_PER_S, RTO_MOST_S, RTO_S, Address

if TYPE_CHECKING:
    from tests.lab.sim.machine import SimMachine

USER_TIMEOUT_S = 20.0  # raw_sockets.py sets it
KEEPALIVE_S = 30.0  # 15 s idle and three probes: there too
SYN_RETRY_S = 1.0
WINDOW_BYTES = 256 << 10  # on the way or unread
SEND_BUFFER_BYTES = 64 << 10
_OPEN, _END = "open", "end"  # what travels in a pipe besides bytes


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Pipe:
    """One direction of a connection."""

    def __init__(self, source: StreamSocket, target: StreamSocket) -> None:
        network = source.machine.network
        self.flying = 0  # bytes
        self._world = network.world
        self._source, self._target = source, target
        self._edge = network.edge(source.machine, target.machine)
        self._back = network.edge(target.machine, source.machine)
        self._stalled: deque[bytes | str] = deque()
        self._since: float | None = None  # nothing gets through, or nothing is acknowledged, since then
        self._arrives_at = 0.0
        self._left_at = -1.0
        self._together: list[bytes | str] = []  # what left at that moment, in one go
        self._label = f"tcp {source.machine.name}>{target.machine.name}"

    def send(self, item: bytes | str) -> None:
        size, now = len(item), self._world.now
        self.flying += size
        if self._stalled or self._edge.cuts:
            self._stalled.append(item)
            self._wait_from_now()
        elif now == self._left_at and item.__class__ is bytes:
            self._together.append(item)  # written at one moment, they are read at one moment
        else:
            arrives_at = max(self._arrives_at, now + self._edge.segment_s())
            self._arrives_at = arrives_at + size / BANDWIDTH_BYTES_PER_S
            self._left_at, self._together = now if item.__class__ is bytes else -1.0, [item]
            self._world.at(self._arrives_at, self._arrive, self._together)

    def _arrive(self, items: list[bytes | str]) -> None:
        item = items[0] if len(items) == 1 else b"".join(items)
        if items is self._together:
            self._left_at = -1.0  # whatever leaves now comes later
        target = self._target
        self.flying -= len(item)
        if target.is_of_former_life:
            if self._source.is_reading or self._source.unsent:
                self._wait_from_now()
            return
        if self._back.cuts:
            self._wait_from_now()
        if item is _OPEN:
            target.opened_by_peer()
        elif target.closed:
            if item is not _END:
                self._reset_source()
        elif item is _END:
            target.end_of_stream()
        else:
            self._world.note_bytes(self._label, item)
            target.arrive(item)

    def _reset_source(self) -> None:
        if not self._back.cuts:
            self._world.at(self._world.now + self._back.trip_s(), self._source.fail, errno.ECONNRESET)

    def _wait_from_now(self) -> None:
        if self._since is None:
            self._since = self._world.now
            self._world.at(self._world.now + RTO_S, self._retry, RTO_S)

    def _retry(self, pause_s: float) -> None:
        source, target = self._source, self._target
        if source.error is not None:
            return
        if source.is_of_former_life:
            source.vanish()
            return
        if self._world.now - self._since >= USER_TIMEOUT_S:
            source.fail(errno.ETIMEDOUT)
        elif self._edge.cuts or self._back.cuts or target.machine.off:
            pause_s = min(2 * pause_s, RTO_MOST_S)
            self._world.at(self._world.now + pause_s, self._retry, pause_s)
        elif target.is_of_former_life:
            self._reset_source()
        else:
            self._since = None
            stalled, self._stalled = self._stalled, deque()
            for item in stalled:
                self.flying -= len(item)  # it has counted since it was written
                self.send(item)


class StreamSocket:
    """What asyncio and the product need of a TCP socket."""

    def __init__(self, machine: SimMachine, port: int = 0) -> None:
        self.machine = machine
        self.local: Address = (machine.ip, port)
        self.remote: Address | None = None
        self.peer: StreamSocket | None = None
        self.error: OSError | None = None
        self.closed = False
        self.unread = 0  # bytes that have arrived
        self.unsent = 0  # bytes that were written and have not left
        self.on_event: Callable[[], None] | None = None  # there is something to read, room to write, or an error
        self._life = machine.life
        self._pipe: Pipe | None = None
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes | str] = deque()
        self._ended = False  # the peer says no more
        self._connected: asyncio.Future[None] | None = None
        self._listening: Listening | None = None  # where it is to be accepted, once the peer knows
        self._readers: deque[asyncio.Future[None]] = deque()
        self._writers: deque[asyncio.Future[None]] = deque()
        machine.sockets[self] = None

    def __repr__(self) -> str:
        peer = self.peer.machine.name if self.peer is not None else "nobody"
        return f"<StreamSocket {self.local} to {self.remote} ({peer}), error {self.error}, unsent {self.unsent}>"

    # --- what the product calls

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def getsockname(self) -> Address:
        return self.local

    def getpeername(self) -> Address:
        if self.remote is None or self.error is not None:
            raise os_error(errno.ENOTCONN)
        return self.remote

    def shutdown(self, how: int) -> None:
        if self.error is not None or self._pipe is None:
            raise os_error(errno.ENOTCONN)
        self._outbox.append(_END)
        self._pump()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.machine.sockets.pop(self, None)
        if self._pipe is not None and self.error is None:
            unopened = self._connected is not None and (not self._connected.done() or self._connected.cancelled())
            if self.unread or unopened:  # the kernel answers with RST if something was not read
                self._outbox.clear()
                self.reset_peer()
            else:
                self._outbox.append(_END)
                self._pump()

    # --- connecting

    @property
    def is_connecting(self) -> bool:
        return self._connected is not None and not self._connected.done() and not self.is_of_former_life

    @property
    def is_of_former_life(self) -> bool:
        return self._life != self.machine.life or not self.machine.running

    @property
    def is_reading(self) -> bool:
        return not self.closed and self.error is None

    async def connect(self, remote: Address) -> None:
        if not self.local[1]:
            self.local = (self.machine.ip, self.machine.fresh_port())
        self.remote = remote
        self._connected = asyncio.get_running_loop().create_future()
        self.machine.connecting.append(self)
        self._send_syn(SYN_RETRY_S)
        try:
            await self._connected
        finally:
            self.machine.connecting.remove(self)

    def _send_syn(self, retry_s: float) -> None:
        if self.is_connecting:
            self.machine.network.syn(self)
            world = self.machine.network.world
            world.at(world.now + retry_s, self._send_syn, 2 * retry_s)

    def pair(self, other: StreamSocket) -> None:
        self.peer, other.peer = other, self
        self._pipe, other._pipe = Pipe(self, other), Pipe(other, self)

    def half_open(self, remote: Address, listening: Listening) -> StreamSocket:
        """The kernel's until the peer is known to know of it."""
        self.remote, self._listening = remote, listening
        del self.machine.sockets[self]
        return self

    def established(self) -> None:
        """The peer's answer has come."""
        if self.is_connecting:
            self._connected.set_result(None)
            self._pipe.send(_OPEN)

    def opened_by_peer(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            self.machine.sockets[self] = None
            listening.arrive(self)

    def refused(self) -> None:
        if self.is_connecting:
            self._connected.set_exception(os_error(errno.ECONNREFUSED))

    # --- writing

    def write(self, data: bytes) -> None:
        machine = self.machine
        if self.error is not None or self.closed or self._life != machine.life or not machine.running:
            return
        if not self._outbox and self._pipe.flying + self.peer.unread < WINDOW_BYTES:
            self._pipe.send(data)
        else:
            self._outbox.append(data)
            self.unsent += len(data)
            self._pump()

    async def send_all(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.write(data)
        while self.unsent > SEND_BUFFER_BYTES and self.error is None:
            future = asyncio.get_running_loop().create_future()
            self._writers.append(future)
            await future
        if self.error is not None:
            raise self.error

    def _pump(self) -> None:
        before = self.unsent
        while self._outbox and self._pipe.flying + self.peer.unread < WINDOW_BYTES:
            item = self._outbox.popleft()
            if item is not _END:
                self.unsent -= len(item)
            self._pipe.send(item)
        if self.unsent < before:
            self._wake(self._writers)

    # --- reading

    def arrive(self, data: bytes) -> None:
        self._inbox.append(data)
        self.unread += len(data)
        self._wake(self._readers)
        if self.peer._outbox:
            self.peer._pump()

    def end_of_stream(self) -> None:
        self._ended = True
        self._wake(self._readers)

    def take(self, count: int) -> bytes | None:
        """At most so many bytes; b"" at the end, None if there is nothing yet. Raises OSError."""
        if self._inbox:
            data = self._inbox.popleft()
            if len(data) > count:
                self._inbox.appendleft(data[count:])
                data = data[:count]
            self.unread -= len(data)
            if self.peer._outbox:
                self.peer._pump()
            return data
        if self.error is not None:
            raise self.error
        return b"" if self._ended else None

    @property
    def has_news(self) -> bool:
        return bool(self._inbox) or self._ended or self.error is not None

    async def receive(self, count: int) -> bytes:
        while (data := self.take(count)) is None:
            future = asyncio.get_running_loop().create_future()
            self._readers.append(future)
            await future
        return data

    # --- ends

    def fail(self, number: int) -> None:
        """The connection is over: a RST has come, or nothing for too long."""
        if self.error is not None or self.is_of_former_life:
            return
        self.error = os_error(number)
        if number == errno.ETIMEDOUT:
            self.vanish()
        self._outbox.clear()
        self.unsent = 0
        self._wake(self._readers)
        self._wake(self._writers)
        if self.is_connecting:
            self._connected.set_exception(self.error)

    def reset_peer(self) -> None:
        """A RST leaves, once."""
        peer, network = self.peer, self.machine.network
        if peer is not None:
            edge = network.edge(self.machine, peer.machine)
            if edge.cuts:
                self.vanish()
            else:
                network.world.at(network.world.now + edge.trip_s(), peer.fail, errno.ECONNRESET)

    def vanish(self) -> None:
        """Nobody tells the peer, whose keep-alive finds it out."""
        if self.peer is not None:
            world = self.machine.network.world
            world.at(world.now + KEEPALIVE_S, self.peer.fail, errno.ETIMEDOUT)

    def _wake(self, waiting: deque[asyncio.Future[None]]) -> None:
        if self.on_event is not None:
            if not self.is_of_former_life:
                self.on_event()
            return
        if self.is_of_former_life:
            return
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(None)


class Listening:
    def __init__(self, machine: SimMachine, port: int) -> None:
        self.machine = machine
        self.port = port or machine.fresh_port()
        self._backlog: deque[StreamSocket] = deque()
        self._acceptors: deque[asyncio.Future[None]] = deque()
        machine.listeners[self.port] = self

    def getsockname(self) -> Address:
        return self.machine.ip, self.port

    def close(self) -> None:
        if self.machine.listeners.get(self.port) is self:
            del self.machine.listeners[self.port]
        for sock in self._backlog:
            sock.close()

    def half_open(self, remote: Address) -> StreamSocket:
        return StreamSocket(self.machine, self.port).half_open(remote, self)

    def arrive(self, sock: StreamSocket) -> None:
        if self.machine.listeners.get(self.port) is not self:
            sock.close()
            return
        self._backlog.append(sock)
        while self._acceptors:
            future = self._acceptors.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def accept(self) -> tuple[StreamSocket, Address]:
        while not self._backlog:
            future = asyncio.get_running_loop().create_future()
            self._acceptors.append(future)
            await future
        sock = self._backlog.popleft()
        return sock, sock.remote
