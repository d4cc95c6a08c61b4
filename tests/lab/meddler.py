"""Somebody on the way: a TCP proxy before a node that, when told to, changes one byte or cuts the stream after some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.node import Node
from ppsmoke.waiting import cancel_and_reap


class Meddler:
    def __init__(self, node: Node) -> None:
        self.done = 0  # deeds
        self.port = 0
        self._node = node
        self._deed: tuple[Literal["flip", "cut"], int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def before(cls, node: Node) -> AsyncIterator[Meddler]:
        self = cls(node)
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await cancel_and_reap(*self._tasks)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self._node.role, 0, self._node.node_id, "127.0.0.1", self.port, None)

    def arm(self, deed: Literal["flip", "cut"], *, at: int) -> None:
        """Of what goes to the node from now on: change the byte at this place, or end the stream before it."""
        self._deed = deed, at

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = None
        try:
            from_node, theirs = await asyncio.open_connection("127.0.0.1", self._node.tcp_port)
            ways = [self._pour(reader, theirs, meddle=True), self._pour(from_node, writer, meddle=False)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_reap(*tasks)
        finally:
            for end in (writer, theirs):
                if end is not None:
                    end.close()

    async def _pour(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, meddle: bool) -> None:
        """Until one of the two ends. A cut is a FIN: what came before it arrives."""
        while data := await source.read(1 << 16):
            if meddle and self._deed is not None:
                deed, at = self._deed
                if at >= len(data):
                    self._deed = deed, at - len(data)
                else:
                    self._deed = None
                    self.done += 1
                    if deed == "cut":
                        target.write(data[:at])
                        await target.drain()
                        return
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            target.write(data)
            await target.drain()
