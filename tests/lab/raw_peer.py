"""A peer that speaks the protocol by hand: a valid member that then says what no node of ours would, or nothing."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl

from ppsmoke.cluster.frames import Frame, FrameDecoder, FrameType, encode_frame
from ppsmoke.cluster.handshake import PROTOCOL_VERSION, Hello, LinkKind, Preamble, Resume, preamble_key
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.node import Node
from tests.lab.cluster import CODE_HASH, MODEL


class RawPeer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, preamble: Preamble) -> None:
        self.preamble = preamble
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    @classmethod
    async def dial(cls, node: Node, identity: Identity, cluster_key: bytes, *, context: ssl.SSLContext | None = None):
        """TLS with the node as that identity, in the role that the two ids give; `context` replaces the honest one."""
        serves = identity.node_id < node.node_id
        context = context or identity.tls_context(side="server" if serves else "client")
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", node.tcp_port)
        preamble = Preamble(LinkKind.DIRECT, identity.node_id, node.node_id, secrets.token_bytes(16))
        transport.write(preamble.seal(preamble_key(cluster_key)))
        return await cls.speak_tls(transport, context, serves=serves, preamble=preamble)

    @classmethod
    async def speak_tls(
        cls, transport: asyncio.BaseTransport, context: ssl.SSLContext, *, serves: bool, preamble: Preamble
    ) -> RawPeer:
        """TLS over a connection on which all that comes before it has been said."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        tls = await loop.start_tls(
            transport, protocol, context, server_side=serves, server_hostname=None if serves else ""
        )
        protocol.connection_made(tls)
        return cls(reader, asyncio.StreamWriter(tls, protocol, reader, loop), preamble)

    @classmethod
    async def linked(cls, node: Node, identity: Identity, cluster_key: bytes, *, epoch: int = 5) -> RawPeer:
        """A link that is up on both sides."""
        peer = await cls.dial(node, identity, cluster_key)
        peer.say_hello(identity.node_id, epoch=epoch)
        serves = identity.node_id < node.node_id
        if not serves:
            peer.write(encode_frame(FrameType.READY))
        await peer.expect(FrameType.HELLO)
        await peer.expect(FrameType.READY)
        if serves:
            peer.write(encode_frame(FrameType.READY))
        return peer

    def say_hello(self, node_id: str, *, epoch: int = 5, resume: Resume | None = None) -> None:
        hello = Hello(PROTOCOL_VERSION, node_id, epoch, resume or Resume(), None, CODE_HASH, MODEL, ())
        self.write(encode_frame(FrameType.HELLO, payload=hello.encode()))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drained(self) -> None:
        """The node, or the kernel for it, has taken what was written; or the connection has ended."""
        try:
            await self._writer.drain()
        except OSError:
            pass

    def stop_reading(self) -> None:
        """From now on; and this side's kernel takes little more."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self._writer.transport.pause_reading()

    async def frame(self) -> Frame | None:
        """The next frame, None at the end of the connection."""
        while not self._frames:
            try:
                data = await self._reader.read(1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

    async def expect(self, kind: FrameType) -> Frame:
        """The next frame of that type; others before it are skipped."""
        while (frame := await self.frame()) is not None:
            if frame.type is kind:
                return frame
        raise AssertionError(f"the connection ended before a {kind.name} frame")

    async def close(self) -> None:
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
