"""Transports of the simulated loop. TLS is played by a stand-in: certificates are exchanged in as many flights as TLS
1.3 takes and compared with the run's CA by its bytes; nothing is signed or encrypted. That peers prove who they are is
shown elsewhere (tests/cluster), over real TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppsmoke.cluster.identity import ALPN, Identity
from tests.lab.sim.streams import StreamSocket

if TYPE_CHECKING:
    from tests.lab.sim.loop import MachineLoop

READ_BYTES = 256 << 10
NOTSENT_BYTES = 128 << 10  # TCP_NOTSENT_LOWAT: so much lies in the kernel, and not in the transport's buffer
HELLO = b"hello!"


@dataclass(frozen=True)
class PlainTls:
    """In the place of an SSLContext."""

    identity: Identity
    side: str


@dataclass(frozen=True)
class Shown:
    """In the place of an SSLObject: what the peer has shown."""

    leaf_der: bytes

    def getpeercert(self, *, binary_form: bool) -> bytes:
        return self.leaf_der

    def selected_alpn_protocol(self) -> str:
        return ALPN


async def secure(sock: StreamSocket, context: PlainTls) -> Shown:
    """The handshake. Raises OSError if the peer hangs up, SSLError if it is of another run."""
    own = context.identity
    card = b"".join(len(part).to_bytes(2, "big") + part for part in (own.ca_der, own.leaf_der))
    if context.side == "server":
        await _exactly(sock, len(HELLO))
        await sock.send_all(card)
        return await _judge(sock, own)
    await sock.send_all(HELLO)
    shown = await _judge(sock, own)
    await sock.send_all(card)
    return shown


async def _judge(sock: StreamSocket, own: Identity) -> Shown:
    ca_der = await _exactly(sock, int.from_bytes(await _exactly(sock, 2), "big"))
    leaf_der = await _exactly(sock, int.from_bytes(await _exactly(sock, 2), "big"))
    if ca_der != own.ca_der:
        raise ssl.SSLError(1, "a certificate of another run")
    return Shown(leaf_der)


async def _exactly(sock: StreamSocket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await sock.receive(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


class StreamTransport(asyncio.Transport):
    def __init__(self, loop: MachineLoop, sock: StreamSocket, protocol: Any, shown: Shown) -> None:
        super().__init__()
        self._loop, self._sock, self._protocol, self._shown = loop, sock, protocol, shown
        self._high, self._low = 64 << 10, 16 << 10
        self._paused = self._closing = self._over = self._scheduled = False
        self.most_buffered = 0
        loop.machine.transports.append(self)
        sock.on_event = self._schedule
        protocol.connection_made(self)
        if sock.has_news:
            self._schedule()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._shown
        if name == "peername":
            return self._sock.remote
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else self._high
        self._low = low if low is not None else self._high // 4

    def get_write_buffer_size(self) -> int:
        return max(0, self._sock.unsent - NOTSENT_BYTES)

    def write(self, data: bytes) -> None:
        if self._over or not data:
            return
        self._sock.write(bytes(data))
        buffered = self._sock.unsent - NOTSENT_BYTES
        if buffered > self._high:
            self.most_buffered = max(self.most_buffered, buffered)
            if not self._paused:
                self._paused = True
                self._protocol.pause_writing()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._schedule()

    def abort(self) -> None:
        self._end(None)

    def _schedule(self) -> None:
        if not self._scheduled and not self._over:
            self._scheduled = True
            self._loop.call_soon(self._on_event)

    def _on_event(self) -> None:
        self._scheduled = False
        sock = self._sock
        if self._over:
            return
        if self._paused and self.get_write_buffer_size() <= self._low:
            self._paused = False
            self._protocol.resume_writing()
        if self._closing:
            if sock.error is not None or not sock.unsent:
                self._end(None)
            return
        try:
            data = sock.take(READ_BYTES)
        except OSError as error:
            self._end(error)
            return
        if data:
            self._protocol.data_received(data)
            if sock.has_news:
                self._schedule()
        elif data is not None and not self._protocol.eof_received():
            self.close()

    def _end(self, error: Exception | None) -> None:
        if not self._over:
            self._over = self._closing = True
            self._sock.on_event = None
            self._loop.call_soon(self._tell_end, error)

    def _tell_end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._sock.close()
            self._loop.machine.transports.remove(self)
