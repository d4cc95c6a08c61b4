"""Sockets that become links: dialled or accepted, a preamble first, then TLS with the roles that the two ids give.

The preamble is read from the raw socket to the byte: a stream reader would swallow the start of TLS with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.handshake import NONCE_BYTES, PREAMBLE_BYTES, LinkKind, Preamble, preamble_key
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.link import Link, LinkOwner, LinkTiming
from ppsmoke.errors import DeadlineExceeded, FrameError, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap

MAX_STRANGERS = 64  # accepted sockets without a valid preamble; a further one costs the oldest its place
MAX_HANDSHAKES = 64  # accepted sockets with a valid one that are not up yet; a further one is refused
ACCEPT_PAUSE_S = 0.1  # after an accept that failed (no file descriptors left, say)
USER_TIMEOUT_MS = 20_000
NOTSENT_LOWAT_BYTES = 128 << 10
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class LinkMaker:
    """What every link of a node has in common: its keys, its owner, its patience."""

    def __init__(self, identity: Identity, cluster_key: bytes, owner: LinkOwner, timing: LinkTiming) -> None:
        self.node_id = identity.node_id
        self.timing = timing
        self.links: set[Link] = set()  # all that have not ended, whatever their state
        self._owner = owner
        self._key = preamble_key(cluster_key)
        self._server_context = identity.tls_context(side="server")
        self._client_context = identity.tls_context(side="client")

    async def dial(self, candidate: Candidate, *, peer_id: str, name: str) -> Link:
        """A link that is up. Raises LinkError; HelloRefused and KeyRefused among them."""
        where = f"{candidate.host}:{candidate.tcp_port}"
        connecting = _within(self.timing.connect_s, _connect(candidate), name=where, doing="nobody answered")
        raw = RawSocket(await connecting)
        try:
            preamble = Preamble(LinkKind.DIRECT, self.node_id, peer_id, secrets.token_bytes(NONCE_BYTES))
            handshake = self._handshake(raw, preamble, name=name, opening=preamble.seal(self._key))
            return await _within(self.timing.handshake_s, handshake, name=where, doing="no handshake")
        finally:
            raw.close()

    async def welcome(self, raw: RawSocket, *, on_known: Callable[[], bool]) -> Link:
        """A link from an accepted socket. on_known is called once the preamble is valid; False: no room, hang up.
        Raises FrameError for a stranger, LinkError for a handshake that failed."""
        data = await _receive_exactly(raw.socket, PREAMBLE_BYTES)
        preamble = Preamble.open(data, self._key)
        if preamble.target != self.node_id or preamble.source == self.node_id:
            raise FrameError("a preamble that is meant for another node")
        if not on_known():
            raise LinkError("too many handshakes at once")
        return await self._handshake(raw, preamble, name="", opening=b"")

    async def _handshake(self, raw: RawSocket, preamble: Preamble, *, name: str, opening: bytes) -> Link:
        """opening: what we say first on a socket that we dialled; nothing on an accepted one."""
        loop = asyncio.get_running_loop()
        tune(raw.socket)
        dialled = bool(opening)
        link = Link(self._owner, preamble, own_id=self.node_id, timing=self.timing, dialled=dialled, name=name)
        self.links.add(link)
        link.closed.add_done_callback(lambda _: self.links.discard(link))
        try:
            if dialled:
                await loop.sock_sendall(raw.socket, opening)
            sock = raw.hand_over()
            if link.serves:
                await loop.connect_accepted_socket(lambda: link, sock, ssl=self._server_context)
            else:
                await loop.create_connection(lambda: link, sock=sock, ssl=self._client_context, server_hostname="")
            await link.opened
            return link
        except asyncio.CancelledError:
            link.abort()
            raise
        except ssl.SSLCertVerificationError as error:
            raise LinkError(f"{link.peer_name} has no certificate of this run ({error.verify_message})") from error
        except ssl.SSLError as error:
            raise LinkError(f"{link.peer_name}: TLS failed ({error.reason or error})") from error
        except OSError as error:
            raise LinkError(
                f"{link.peer_name} hung up before TLS: another cluster key, not ready yet, or no node of ours"
            ) from error
        finally:
            if link.state == "tls":  # it got no further; beyond, it may have a BYE to say and ends by itself
                link.abort()


class RawSocket:
    """A socket that is ours to close until a transport has taken it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._ours = True

    def hand_over(self) -> socket.socket:
        self._ours = False
        return self.socket

    def close(self) -> None:
        if self._ours:
            self.socket.close()


class Listener:
    """Accepts until closed. A stranger is dropped without a byte; what one peer does never stops the rest."""

    def __init__(self, host: str, port: int, maker: LinkMaker) -> None:
        self._socket = listening_socket(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._maker = maker
        self._strangers: dict[asyncio.Task[None], RawSocket] = {}  # oldest first
        self._known: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()  # accepted, strangers, evicted, refused, linked
        self.last_refusal = ""

    def start(self) -> None:
        self._accepting = asyncio.ensure_future(self._accept_for_ever())
        self._accepting.set_name("accept")

    async def close(self) -> None:
        tasks = [task for task in (self._accepting, *self._strangers, *self._known) if task is not None]
        await cancel_and_reap(*tasks)
        self._socket.close()

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self.counts["accepted"] += 1
            if len(self._strangers) >= MAX_STRANGERS:
                self._evict_oldest()
            raw = RawSocket(sock)
            task = asyncio.ensure_future(self._welcome(raw))
            task.set_name("welcome")
            self._strangers[task] = raw
            task.add_done_callback(lambda done, raw=raw: self._forget(done, raw))

    def _evict_oldest(self) -> None:
        """Whoever is honest sends its preamble at once: the oldest is the likeliest stranger."""
        task = next(iter(self._strangers))
        self._strangers.pop(task)
        self._known.add(task)  # until it has ended
        self.counts["evicted"] += 1
        task.cancel()

    def _forget(self, task: asyncio.Task[None], raw: RawSocket) -> None:
        raw.close()  # here, because a task that is cancelled before its first step runs no `finally`
        self._strangers.pop(task, None)
        self._known.discard(task)

    async def _welcome(self, raw: RawSocket) -> None:
        try:
            await Deadline.after(self._maker.timing.handshake_s).wait(
                self._maker.welcome(raw, on_known=self._on_known(asyncio.current_task())), doing="a handshake"
            )
            self.counts["linked"] += 1
        except (FrameError, ConnectionError, DeadlineExceeded):
            self.counts["strangers"] += 1
        except LinkError as error:
            self.counts["refused"] += 1
            self.last_refusal = error.cause

    def _on_known(self, task: asyncio.Task[None] | None) -> Callable[[], bool]:
        def known() -> bool:
            if task is None or len(self._known) >= MAX_HANDSHAKES:
                return False
            self._strangers.pop(task, None)
            self._known.add(task)
            return True

        return known


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
    return sock


def tune(sock: socket.socket) -> None:
    """Options of a link's socket; what this system lacks is left out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_USER_TIMEOUT": USER_TIMEOUT_MS, "TCP_NOTSENT_LOWAT": NOTSENT_LOWAT_BYTES, **_KEEPALIVE}
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def _connect(candidate: Candidate) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(candidate.host, candidate.tcp_port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise FrameError("hung up within the preamble")
        data += more
    return data


async def _within(seconds: float, coroutine: Coroutine[Any, Any, Any], *, name: str, doing: str) -> Any:
    """The coroutine's result; whatever the network did to it becomes a LinkError."""
    try:
        return await Deadline.after(seconds).wait(coroutine, doing=doing)
    except DeadlineExceeded as error:
        raise LinkError(f"{name}: {doing} within {seconds:g} s") from error
    except socket.gaierror as error:
        raise LinkError(f"{name}: no such host ({error.strerror})") from error
    except OSError as error:  # asyncio puts its own words in strerror
        raise LinkError(f"{name}: {os.strerror(error.errno) if error.errno else error}") from error
