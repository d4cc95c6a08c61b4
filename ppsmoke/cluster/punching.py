"""Holes as their two ends see them: ask the relay, probe it from a fresh port, start when it says so, be linked."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from ppsmoke.cluster.asked import AskedLinks
from ppsmoke.cluster.handshake import LinkKind, Preamble
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.punch import DEADLINE_S, punch
from ppsmoke.cluster.raw_sockets import RawSocket, within
from ppsmoke.cluster.rendezvous import PROBES_S
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.signals import Mapped, NoPunch, PunchAsk, PunchAt
from ppsmoke.cluster.signals import Rendezvous as RendezvousAt
from ppsmoke.cluster.sockets import LinkMaker
from ppsmoke.errors import FrameError, LinkError
from ppsmoke.waiting import cancel_and_reap

SECOND_PROBE_S = 0.25  # beyond a round trip after the first
MAX_ATTEMPTS = 16


@dataclass(eq=False)
class _Attempt:
    relay: Peer
    peer: Peer
    start: asyncio.Future[PunchAt]


class Puncher:
    def __init__(self, roster: Roster, maker: LinkMaker) -> None:
        self._roster = roster
        self._maker = maker
        self._rng = maker.machine.random()
        self._asked = AskedLinks()  # of relays about peers
        self._attempts: dict[bytes, _Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await cancel_and_reap(*self._tasks)

    async def ask(self, peer: Peer, relay: Peer) -> Link:
        """A punched link that is up. Raises LinkError."""

        def ask() -> None:
            if not self._roster.tell(relay.node_id, PunchAsk(peer.node_id)):
                self._asked.settle(relay.node_id, peer.node_id, LinkError(f"the link to {relay.name} is gone"))

        within_s = 2 * PROBES_S + DEADLINE_S + self._maker.timing.handshake_s
        silence = f"no hole: {relay.name} does not answer"
        return await self._asked.wait(relay.node_id, peer.node_id, ask=ask, within_s=within_s, silence=silence)

    def on_rendezvous(self, relay: Peer, signal: RendezvousAt) -> None:
        peer = self._roster.peers.get(signal.peer)
        if peer is None or len(self._attempts) >= MAX_ATTEMPTS or signal.attempt in self._attempts:
            return
        attempt = _Attempt(relay, peer, asyncio.get_running_loop().create_future())
        self._attempts[signal.attempt] = attempt
        task = asyncio.ensure_future(self._take_part(attempt, signal))
        task.set_name(f"hole to {peer.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_punch_at(self, relay: Peer, signal: PunchAt) -> None:
        attempt = self._attempts.get(signal.attempt)
        if attempt is not None and attempt.relay is relay and not attempt.start.done():
            attempt.start.set_result(signal)

    def on_no_punch(self, relay: Peer, signal: NoPunch) -> None:
        peer = self._roster.peers.get(signal.peer)
        if peer is None or peer.link is None or peer.link.via != relay.node_id:
            return  # nobody else's opinion was asked
        peer.upgrades.no_punch(f"no hole: {signal.reason}", for_good=signal.for_good)
        self._asked.settle(relay.node_id, signal.peer, LinkError(f"no hole: {signal.reason}"))
        for attempt in self._attempts.values():
            if (attempt.relay, attempt.peer) == (relay, peer) and not attempt.start.done():
                attempt.start.cancel()

    async def _take_part(self, attempt: _Attempt, signal: RendezvousAt) -> None:
        peer, asked = attempt.peer, (attempt.relay.node_id, attempt.peer.node_id)
        probes: list[socket.socket] = []
        try:
            mapped = await self._probe(attempt.relay, signal, probes)
            self._roster.tell(attempt.relay.node_id, mapped)
            start = await self._word_of_start(attempt)
            self._asked.settle(*asked, await self._punch(peer, mapped.local_port, start))
        except LinkError as error:
            peer.upgrades.no_punch(f"no hole: {error.cause}", for_good=False)
            self._asked.settle(*asked, LinkError(f"no hole: {error.cause}"))
        finally:
            del self._attempts[signal.attempt]
            for sock in probes:
                sock.close()

    async def _word_of_start(self, attempt: _Attempt) -> PunchAt:
        await asyncio.wait({attempt.start}, timeout=2 * PROBES_S)
        if not attempt.start.done() or attempt.start.cancelled():
            raise LinkError(attempt.peer.upgrades.note.removeprefix("no hole: ") or "the relay gave no word to start")
        return attempt.start.result()

    async def _probe(self, relay: Peer, signal: RendezvousAt, probes: list[socket.socket]) -> Mapped:
        """Both probes from one fresh port; the connections, which stay open, are added to `probes`."""
        where = relay.link.where if relay.link is not None else None
        if where is None:
            return Mapped(signal.attempt, 0, 0, (), "it does not dial the relay")
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), self._maker.timing.connect_s
        try:
            found = await within(
                seconds,
                loop.getaddrinfo(where.host, where.tcp_port, type=socket.SOCK_STREAM),
                name=where.host,
                doing="no address",
            )
            family, address = found[0][0], found[0][4]
            first = self._probe_socket(family, 0, probes)
            port = first.getsockname()[1]
            second = self._probe_socket(family, port, probes)
            at_second = asyncio.ensure_future(
                self._probe_one(second, (address[0], signal.second_port), relay, signal.attempt)
            )
            try:
                probing = self._probe_one(first, address, relay, signal.attempt)
                await within(seconds, probing, name=where.host, doing="no answer to a probe")
                rtt_s = (loop.time() - began) / 2  # a connection and an answer
                # Without the second, which may lie behind the relay's firewall, it judges by one port alone.
                await asyncio.wait({at_second}, timeout=SECOND_PROBE_S + rtt_s)
            finally:
                await cancel_and_reap(at_second)
        except (LinkError, FrameError, OSError) as error:
            return Mapped(signal.attempt, 0, 0, (), f"its probe failed ({error})")
        host = first.getsockname()[0]
        return Mapped(signal.attempt, port, int(rtt_s * 1e6), ((host, port),), "")

    def _probe_socket(self, family: int, port: int, probes: list[socket.socket]) -> socket.socket:
        sock = self._maker.machine.reusing_socket(family, port)
        probes.append(sock)
        return sock

    async def _probe_one(self, sock: socket.socket, address: tuple[str, int], relay: Peer, nonce: bytes) -> None:
        if address[1]:
            await asyncio.get_running_loop().sock_connect(sock, address)
            await self._maker.probe(sock, peer_id=relay.node_id, nonce=nonce)

    async def _punch(self, peer: Peer, port: int, start: PunchAt) -> Link:
        own_id = self._maker.node_id
        mine = Preamble(LinkKind.PUNCHED, own_id, peer.node_id, start.attempt)
        await asyncio.sleep(min(start.delay_us / 1e6, 1.0))
        raw: RawSocket = await punch(
            port,
            start.targets,
            lambda sock: self._maker.greet(sock, mine),
            rng=self._rng,
            open_socket=self._maker.machine.reusing_socket,
        )
        try:
            # Nobody dialled: by agreement the lower id did.
            source, target = sorted((own_id, peer.node_id))
            preamble = Preamble(LinkKind.PUNCHED, source, target, start.attempt)
            handshake = self._maker.handshake(raw, preamble, name=peer.name, dialled=own_id == source)
            return await within(self._maker.timing.handshake_s, handshake, name=peer.name, doing="no handshake")
        finally:
            raw.close()
