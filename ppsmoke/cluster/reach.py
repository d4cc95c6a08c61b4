"""How this node reaches others: the ways that an attempt can go, and who answers whom about them (signals.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from ppsmoke.cluster.changes import Signal as Changed
from ppsmoke.cluster.dialling import Dialler
from ppsmoke.cluster.handshake import LinkKind, Preamble
from ppsmoke.cluster.legs import Legs
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.paths import Attempt
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.port_checks import PortChecks
from ppsmoke.cluster.punching import Puncher
from ppsmoke.cluster.raw_sockets import RawSocket
from ppsmoke.cluster.relay import Relay
from ppsmoke.cluster.rendezvous import Rendezvous
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.signals import (
    Connect,
    DialBack,
    DialledBack,
    LegClosed,
    Mapped,
    NoLeg,
    NoPunch,
    PunchAsk,
    PunchAt,
    Signal,
    Token,
)
from ppsmoke.cluster.signals import Rendezvous as RendezvousAt
from ppsmoke.cluster.sockets import LinkMaker


class Reach:
    def __init__(
        self, roster: Roster, maker: LinkMaker, changed: Changed, *, host: str, learn: Callable[[Peer], None]
    ) -> None:
        """host: where this node listens, and would listen for a second port as a rendezvous. learn: see Dialler."""
        self._roster = roster
        self._maker = maker
        self.relay = Relay(roster, maker)
        self.rendezvous = Rendezvous(roster, maker, host=host)
        self.port_checks = PortChecks(roster, maker)
        self._legs = Legs(roster, maker)
        self._puncher = Puncher(roster, maker)
        self.dialler = Dialler(self._open, self._relays_to, learn, changed, maker.timing, maker.machine.random())
        maker.doors[LinkKind.RELAYED] = self._on_leg
        maker.doors[LinkKind.PROBE] = self.rendezvous.on_probe
        roster.on_signal = self._on_signal

    def counters(self) -> list[tuple[str, Counter[str]]]:
        """Its parts, for counters.py."""
        legs = self._legs.counts
        return [
            ("relay", self.relay.counts),
            ("relay", Counter({"bad-token": legs["bad-token"]})),
            ("hole", self.rendezvous.counts),
            ("link", Counter({"too-many-tokens": legs["too-many-tokens"]})),
            ("door", self.rendezvous.door_counts),
        ]

    async def close(self) -> None:
        self._roster.on_signal = lambda peer, signal: None  # nothing new is begun
        await asyncio.gather(*(part.close() for part in (self.dialler, self._legs, self._puncher, self.port_checks)))
        await asyncio.gather(self.relay.close(), self.rendezvous.close())

    def news_of(self, node_id: str) -> None:
        """Somebody has heard of that node: whoever it is linked to may relay."""
        peer = self._roster.peers.get(node_id)
        if peer is not None and peer.link is None:
            peer.news += 1

    async def _open(self, peer: Peer, attempt: Attempt) -> Link:
        if attempt.kind is LinkKind.DIRECT:
            return await self._maker.dial(attempt.candidate, peer_id=peer.node_id, name=peer.name)
        relay = self._roster.peer(attempt.relay)
        if attempt.kind is LinkKind.RELAYED:
            return await self._legs.connect(peer, relay)
        return await self._puncher.ask(peer, relay)

    def _relays_to(self, peer: Peer) -> list[str]:
        """Directly linked nodes, the nearest first: only such a link can be followed by a leg."""
        found = [
            other
            for other in self._roster.peers.values()
            if other is not peer and other.link is not None and other.link.kind is LinkKind.DIRECT
        ]
        found.sort(key=lambda other: (other.link.rtt_s is None, other.link.rtt_s, other.node_id))
        return [other.node_id for other in found]

    async def _on_leg(self, raw: RawSocket, preamble: Preamble) -> Link | None:
        """A relay leg was dialled here: to us as the relay, if the token is ours, else by the relay of one of ours."""
        if self.relay.knows(preamble.nonce):
            return await self.relay.on_leg(raw, preamble)
        return await self._legs.on_leg(raw, preamble)

    def _on_signal(self, peer: Peer, signal: Signal) -> None:
        match signal:
            case Connect(to):
                self.relay.on_connect(peer, to)
            case Token():
                self._legs.on_token(peer, signal)
            case NoLeg():
                self._legs.on_refused(peer, signal)
            case LegClosed(token, other, reason):
                if (relayed := self._roster.peers.get(other)) is not None:
                    relayed.leg_closed(token, peer.node_id, f"over the relay {peer.name}: {reason}")
            case PunchAsk():
                self.rendezvous.on_ask(peer, signal)
            case Mapped():
                self.rendezvous.on_mapped(peer, signal)
            case RendezvousAt():
                self._puncher.on_rendezvous(peer, signal)
            case PunchAt():
                self._puncher.on_punch_at(peer, signal)
            case NoPunch():
                self._puncher.on_no_punch(peer, signal)
            case DialBack():
                self.port_checks.on_request(peer, signal)
            case DialledBack():
                self.port_checks.on_answer(peer, signal)
