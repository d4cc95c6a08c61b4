"""A CONNECT proxy on loopback: how pip in a container without a network reaches the configured package index."""

from __future__ import annotations

import asyncio
from contextlib import suppress

MAX_HEAD_BYTES = 16384
ALLOWED_PORTS = (80, 443)


class ConnectProxy:
    def __init__(self, server: asyncio.AbstractServer) -> None:
        self._server = server
        self.address: tuple[str, int] = server.sockets[0].getsockname()[:2]

    @classmethod
    async def open(cls) -> ConnectProxy:
        return cls(await asyncio.start_server(_serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES))

    async def close(self) -> None:
        self._server.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        host, _, port = target.rpartition(":")
        if method == "CONNECT" and int(port) in ALLOWED_PORTS:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        else:
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
    writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
