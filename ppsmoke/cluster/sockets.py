"""Sockets that become links: dialled or accepted, a preamble first, then TLS with the roles that the two ids give.

The preamble is read from the raw socket to the byte: a stream reader would swallow the start of TLS with it.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.crowd import Crowd
from ppsmoke.cluster.handshake import NONCE_BYTES, PREAMBLE_BYTES, LinkKind, Observed, Preamble, preamble_key
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.link import Link, LinkOwner
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.machine import Machine
from ppsmoke.cluster.raw_sockets import RawSocket, connect, receive_exactly, tune, within
from ppsmoke.errors import DeadlineExceeded, FrameError, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap

MAX_STRANGERS = 64  # accepted sockets without a valid preamble; for a further one somebody has to go (crowd.py)
MAX_HANDSHAKES = 64  # accepted sockets with a valid one that are not up yet; the same
MAX_NONCES = 4096  # of preambles that were let in; whoever has only overheard one cannot use it again
ACCEPT_PAUSE_S = 0.1  # after an accept that failed (no file descriptors left, say)

# What becomes of an accepted socket whose preamble is no direct link's: the link that it became, None if none.
Door = Callable[[RawSocket, Preamble], Coroutine[Any, Any, Link | None]]


class LinkMaker:
    """What every link of a node has in common: its keys, its owner, its patience."""

    def __init__(
        self, identity: Identity, cluster_key: bytes, owner: LinkOwner, timing: LinkTiming, machine: Machine
    ) -> None:
        self.node_id = identity.node_id
        self.timing = timing
        self.machine = machine
        self.links: dict[Link, None] = {}  # all that have not ended, whatever their state, the oldest first
        self._owner = owner
        self._key = preamble_key(cluster_key)
        self._server_context = machine.tls_context(identity, side="server")
        self._client_context = machine.tls_context(identity, side="client")
        self._nonces: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self.counts: Counter[str] = Counter()  # handshakes that failed, by reason, whoever dialled
        self.doors: dict[LinkKind, Door] = {}  # who takes accepted sockets of the other kinds

    async def dial(self, candidate: Candidate, *, peer_id: str, name: str) -> Link:
        """A link that is up. Raises LinkError; HelloRefused and KeyRefused among them."""
        where = f"{candidate.host}:{candidate.tcp_port}"
        preamble = Preamble(LinkKind.DIRECT, self.node_id, peer_id, self.machine.token(NONCE_BYTES))
        raw = await self._open(candidate, preamble)
        try:
            handshake = self.handshake(raw, preamble, name=name, dialled=True, where=candidate)
            return await within(self.timing.handshake_s, handshake, name=where, doing="no handshake")
        finally:
            raw.close()

    async def open_leg(self, candidate: Candidate, *, peer_id: str, token: bytes) -> RawSocket:
        """A relay leg towards the relay, or from it. Raises LinkError."""
        return await self._open(candidate, Preamble(LinkKind.RELAYED, self.node_id, peer_id, token))

    async def probe(self, sock: socket.socket, *, peer_id: str, nonce: bytes) -> Observed:
        """Ask, over a socket that is connected, whether this is the peer and as whom it sees us. Raises FrameError if
        the answer is none of our cluster's, OSError."""
        preamble = Preamble(LinkKind.PROBE, self.node_id, peer_id, nonce)
        await asyncio.get_running_loop().sock_sendall(sock, preamble.seal(self._key))
        return Observed.open(await receive_exactly(sock, PREAMBLE_BYTES), self._key, nonce)

    async def answer_probe(self, raw: RawSocket, preamble: Preamble) -> Observed:
        """Tell the prober its own address; what we told it. Raises OSError."""
        observed = Observed(*raw.socket.getpeername()[:2])
        await asyncio.get_running_loop().sock_sendall(raw.socket, observed.seal(self._key, preamble.nonce))
        return observed

    async def greet(self, sock: socket.socket, preamble: Preamble) -> None:
        """On a socket that neither side accepted: both say a preamble, and read the other's. Raises FrameError."""
        await asyncio.get_running_loop().sock_sendall(sock, preamble.seal(self._key))
        theirs = Preamble.open(await receive_exactly(sock, PREAMBLE_BYTES), self._key)
        if theirs != Preamble(preamble.kind, preamble.target, preamble.source, preamble.nonce):
            raise FrameError("somebody else is at the other end of the punched connection")

    async def welcome(self, raw: RawSocket, *, on_known: Callable[[], None]) -> Link | None:
        """An accepted socket: its link, or None if it is taken care of otherwise. on_known is called once the preamble
        is valid. Raises FrameError for a stranger, LinkError for a handshake that failed."""
        data = await receive_exactly(raw.socket, PREAMBLE_BYTES)
        preamble = Preamble.open(data, self._key)
        if preamble.target != self.node_id or preamble.source == self.node_id:
            raise FrameError("a preamble that is meant for another node", reason="wrong-target")
        if preamble.kind is LinkKind.DIRECT:
            self._note_nonce(preamble.nonce)
            on_known()
            return await self.handshake(raw, preamble, name="", dialled=False)
        if preamble.kind not in self.doors:
            raise FrameError(f"a {preamble.kind.name} preamble where none is due", reason="other-protocol")
        on_known()
        return await self.doors[preamble.kind](raw, preamble)

    async def connect(self, candidate: Candidate) -> RawSocket:
        """A socket without a preamble. Raises LinkError."""
        where, connecting = f"{candidate.host}:{candidate.tcp_port}", connect(candidate, self.machine.stream_socket)
        return RawSocket(await within(self.timing.connect_s, connecting, name=where, doing="nobody answered"))

    def _note_nonce(self, nonce: bytes) -> None:
        """Raises FrameError for one that was used before."""
        if nonce in self._nonces:
            raise FrameError("a preamble that was used before", reason="replayed")
        self._nonces[nonce] = None
        if len(self._nonces) > MAX_NONCES:
            self._nonces.popitem(last=False)

    async def _open(self, candidate: Candidate, preamble: Preamble) -> RawSocket:
        where = f"{candidate.host}:{candidate.tcp_port}"
        raw = await self.connect(candidate)
        try:
            tune(raw.socket)
            sending = asyncio.get_running_loop().sock_sendall(raw.socket, preamble.seal(self._key))
            await within(self.timing.connect_s, sending, name=where, doing="no room for a preamble")
            return raw
        except BaseException:
            raw.close()
            raise

    async def handshake(
        self,
        raw: RawSocket,
        preamble: Preamble,
        *,
        name: str,
        dialled: bool,
        where: Candidate | None = None,
        via: str = "",
    ) -> Link:
        """A link that is up, from a socket on which both sides know the preamble. where: what was dialled; via: the
        relay's id. Raises LinkError."""
        tune(raw.socket)
        link = Link(self._owner, preamble, own_id=self.node_id, timing=self.timing, dialled=dialled, name=name)
        link.where, link.via = where, via
        self.links[link] = None
        link.closed.add_done_callback(lambda _: self.links.pop(link))
        try:
            await self._open_tls(link, raw.hand_over())
            await link.opened
            return link
        except asyncio.CancelledError:
            link.abort()
            raise
        except LinkError as error:
            self.counts[error.reason or "failed"] += 1
            raise
        finally:
            if link.state == "tls":  # it got no further; beyond, it may have a BYE to say and ends by itself
                link.abort()

    async def _open_tls(self, link: Link, sock: socket.socket) -> None:
        """TLS in the role that the two ids give. Raises LinkError."""
        loop = asyncio.get_running_loop()
        try:
            if link.serves:
                await loop.connect_accepted_socket(lambda: link, sock, ssl=self._server_context)
            else:
                await loop.create_connection(lambda: link, sock=sock, ssl=self._client_context, server_hostname="")
        except ssl.SSLCertVerificationError as error:
            text = f"{link.peer_name} has no certificate of this run ({error.verify_message})"
            raise LinkError(text, reason="wrong-certificate") from error
        except ssl.SSLError as error:
            bare = error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
            text = f"{link.peer_name}: TLS failed ({error.reason or error})"
            raise LinkError(text, reason="no-certificate" if bare else "tls") from error
        except OSError as error:
            raise LinkError(
                f"{link.peer_name} hung up before TLS: another cluster key, not ready yet, or no node of ours",
                reason="hung-up",
            ) from error


class Listener:
    """Accepts until closed. A stranger is dropped without a byte; what one peer does never stops the rest."""

    def __init__(self, host: str, port: int, maker: LinkMaker) -> None:
        self._socket = maker.machine.listening_socket(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._maker = maker
        self._tasks: dict[RawSocket, asyncio.Task[None]] = {}  # of all that are not done with
        self._strangers: Crowd[RawSocket] = Crowd(MAX_STRANGERS)
        self._known: Crowd[RawSocket] = Crowd(MAX_HANDSHAKES)
        self._accepting: asyncio.Task[None] | None = None
        # accepted, linked; strangers and refused: how many in all, and beside them by reason (counters.py)
        self.counts: Counter[str] = Counter()
        self.last_refusal = ""

    def __len__(self) -> int:
        """Sockets that it holds, and that are no links yet."""
        return len(self._tasks)

    def start(self) -> None:
        self._accepting = asyncio.ensure_future(self._accept_for_ever())
        self._accepting.set_name("accept")

    async def close(self) -> None:
        # Cancelling alone leaves asyncio's callback for a connection that has just come, which then finds no taker.
        asyncio.get_running_loop().remove_reader(self._socket)
        tasks = [task for task in (self._accepting, *self._tasks.values()) if task is not None]
        await cancel_and_reap(*tasks)
        self._socket.close()

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self.counts["accepted"] += 1
            raw = RawSocket(sock)
            task = asyncio.ensure_future(self._welcome(raw, address[0]))
            task.set_name("welcome")
            self._tasks[raw] = task
            task.add_done_callback(functools.partial(self._forget, raw))
            self._let_go(self._strangers.enter(raw, address[0]), "evicted")
            # An accept that finds somebody waiting does not wait itself: a flood must leave the loop to others.
            await asyncio.sleep(0)

    def _let_go(self, raw: RawSocket | None, reason: str) -> None:
        if raw is not None:
            self.counts[reason] += 1
            self._tasks[raw].cancel()

    def _forget(self, raw: RawSocket, _: asyncio.Task[None]) -> None:
        raw.close()  # here, because a task that is cancelled before its first step runs no `finally`
        del self._tasks[raw]
        self._strangers.leave(raw)
        self._known.leave(raw)

    async def _welcome(self, raw: RawSocket, host: str) -> None:
        """Nothing here may refer to its own task: its exception refers to this frame, and asyncio's 256 KiB for a TLS
        connection would then stay until a garbage collection, which a flood of them need not bring about."""

        def on_known() -> None:
            self._strangers.leave(raw)
            self._let_go(self._known.enter(raw, host), "handshake-evicted")

        try:
            link = await Deadline.after(self._maker.timing.handshake_s).wait(
                self._maker.welcome(raw, on_known=on_known), doing="a handshake"
            )
            self.counts["linked"] += link is not None
        except DeadlineExceeded:
            self._drop("handshake-too-slow" if raw in self._known else "too-slow")
        except FrameError as error:
            self._drop(error.reason)
        except ConnectionError:
            self._drop("hung-up")
        except LinkError as error:
            self.counts["refused"] += 1
            self.last_refusal = error.cause

    def _drop(self, reason: str) -> None:
        self.counts["strangers"] += 1
        self.counts[reason] += 1
