"""The simulated UDP socket: one datagram is read in a turn of the loop, and what a full buffer cannot hold is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.lab.sim.network import Address

if TYPE_CHECKING:
    from tests.lab.sim.loop import MachineLoop

MAX_UNREAD = 200  # a kernel's default buffer of 212,992 bytes, with its cost per datagram


class DatagramTransport(asyncio.DatagramTransport):
    def __init__(self, loop: MachineLoop, protocol: Any, local: Address) -> None:
        super().__init__()
        self.protocol = protocol
        self.port = local[1] or loop.machine.fresh_port()
        self._loop = loop
        self._unread: deque[tuple[bytes, Address]] = deque()
        self._label = f"udp {loop.machine.name}"
        self._closed = False
        self._scheduled = False
        loop.machine.udp_endpoints[self.port] = self
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._loop.machine.ip, self.port) if name == "sockname" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def sendto(self, data: bytes, address: Address) -> None:
        machine = self._loop.machine
        if not self._closed and machine.loop is self._loop:
            machine.network.datagram(machine, self.port, bytes(data), address)

    def arrive(self, data: bytes, source: Address) -> None:
        if self._closed or len(self._unread) >= MAX_UNREAD:
            return
        machine = self._loop.machine
        machine.network.world.note_bytes(self._label, data)
        self._unread.append((data, source))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read_one)

    def _read_one(self) -> None:
        self._scheduled = False
        if self._closed or not self._unread:
            return
        data, source = self._unread.popleft()
        if self._unread:
            self._scheduled = True
            self._loop.call_soon(self._read_one)
        self.protocol.datagram_received(data, source)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            machine = self._loop.machine
            if machine.udp_endpoints.get(self.port) is self:
                del machine.udp_endpoints[self.port]
            self._loop.call_soon(self.protocol.connection_lost, None)

    abort = close
