"""All peers of a node: which link to each is kept, who may still speak for a role, what is told to whom."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.events import Event, LinkDown, LinkUp
from ppsmoke.cluster.frames import Frame, FrameType, encode_frame
from ppsmoke.cluster.handshake import PROTOCOL_VERSION, Bye, ByeReason, Hello, LinkKind
from ppsmoke.cluster.identity import NODE_ID_BYTES
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.peer import Peer, PeerContext
from ppsmoke.cluster.signals import Signal, decode_signal, encode_signal
from ppsmoke.errors import FrameError, LinkError

DRAIN_S = 5.0  # a replaced link is kept this long at most until the peer is seen to use the new one
MAX_PEERS = 1024  # beyond it, nobody becomes one by another's word alone
YOUNG_LINK_S = 2.0  # a link this young may be news that the peer's HELLO on another could not know of yet

_log = logging.getLogger("ppsmoke.cluster")


class Roster:
    """The owner of every link (link.py, LinkOwner)."""

    def __init__(
        self,
        node_id: str,
        context: PeerContext,
        *,
        code_hash: str,
        model: str,
        emit: Callable[[Event], None],
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self.candidates: tuple[Candidate, ...] = ()
        self.udp_port: int | None = None
        self.on_linked: Callable[[Peer], None] = lambda peer: None
        self.on_unlinked: Callable[[Peer], None] = lambda peer: None
        self.on_heard: Callable[[Peer], None] = lambda peer: None
        self.on_datagram: Callable[[Peer, bytes], None] = lambda peer, data: None
        self.on_signal: Callable[[Peer, Signal], None] = lambda peer, signal: None
        # carried, not-carried: datagrams passed on for others, and dropped; links that ended without a BYE, by reason
        self.counts: Counter[str] = Counter()
        self._node_id = node_id
        self._context = context
        self._code_hash = code_hash
        self._model = model
        self._emit = emit
        self._generations: dict[str, int] = {}
        self._admissions = 0
        self._now = asyncio.get_running_loop().time

    def knows_or_has_room(self, node_id: str) -> bool:
        """Whether a node that somebody merely speaks of may become a peer here."""
        return node_id in self.peers or len(self.peers) < MAX_PEERS

    def peer(self, node_id: str) -> Peer:
        """The peer of that id, which may never have been heard of."""
        if node_id not in self.peers:
            self.peers[node_id] = Peer(node_id, self._context)
        return self.peers[node_id]

    def supersede(self, role: str, generation: int) -> None:
        """From now on only this generation of the role, or a later one, is listened to."""
        self._generations[role] = max(generation, self._generations.get(role, 0))
        for peer in list(self.peers.values()):
            known = (peer.endpoint.role, peer.endpoint.generation) if peer.endpoint else (peer.role, peer.generation)
            if known[0] == role and known[1] < generation and not peer.superseded:
                peer.superseded = True
                if peer.link is not None:
                    peer.link.close(Bye(ByeReason.SUPERSEDED, f"{role} is generation {generation} now"))
        self._context.changed.notify()

    def send_datagram(self, node_id: str, data: bytes) -> bool:
        """A membership datagram over the link, if there is one that is not busy. Never waits."""
        peer = self.peers.get(node_id)
        if peer is None or peer.link is None:
            return False
        carrier = self.peers.get(peer.link.via)
        if carrier is not None and carrier.link is not None and not carrier.link.paused:
            # Not inside the relayed bulk: the relay drops what it cannot pass on at once, so none comes late.
            payload = bytes.fromhex(self._node_id) + bytes.fromhex(node_id) + data
            carrier.link.write(encode_frame(FrameType.CARRY, payload=payload))
            return True
        if peer.link.paused:
            return False
        peer.link.write(encode_frame(FrameType.SWIM, payload=data))
        return True

    def tell(self, node_id: str, signal: Signal) -> bool:
        """False if there is no link to tell it over."""
        peer = self.peers.get(node_id)
        if peer is None or peer.link is None:
            return False
        peer.link.write(encode_frame(FrameType.SIGNAL, payload=encode_signal(signal)))
        return True

    # --- LinkOwner

    def hello_for(self, peer_id: str) -> Hello:
        peer = self.peer(peer_id)
        return Hello(
            version=PROTOCOL_VERSION,
            node_id=self._node_id,
            epoch=self._context.epoch,
            resume=peer.session.resume(peer.link.id if peer.link and not peer.link.silent else 0),
            udp_port=self.udp_port,
            code_hash=self._code_hash,
            model=self._model,
            candidates=self.candidates,
        )

    def admit(self, link: Link) -> Bye | None:
        """The lower id decides, so that both ends keep the same link (facts/network.md, 4.6): the better class, then
        the one that the lower id dialled, then the older. A link that is silent here, or that the peer has lost or
        finds silent, is never kept."""
        refusal = self._outdated(link) or self._why_not_this_one(link, self.peer(link.peer_id))
        if refusal is None:
            self._admissions += 1
            link.admission = self._admissions
        return refusal

    def _why_not_this_one(self, link: Link, peer: Peer) -> Bye | None:
        current = peer.link
        if current is None or link.hello.epoch != peer.epoch:
            return None
        lost = current.silent or link.hello.resume.current_link != current.id  # here, or by the peer
        if lost and self._now() - current.up_at >= YOUNG_LINK_S:
            return None
        return None if _rank(link) < _rank(current) else Bye(ByeReason.DUPLICATE, "another link is kept")

    def link_up(self, link: Link) -> None:
        peer = self.peer(link.peer_id)
        if not link.serves and (refusal := self._outdated(link)) is not None:
            link.close(refusal)
            return
        restarted = peer.epoch not in (0, link.hello.epoch)
        role, generation = link.peer.role, link.peer.generation
        if generation > self._generations.setdefault(role, generation):
            self.supersede(role, generation)  # only the successor on a replaced host's place has that certificate
        current = peer.link
        if not link.serves and current is not None and not restarted and link.admission < current.admission:
            return  # its READY was overtaken: the peer has replaced this link already, and is about to end it
        old = peer.attach(link)
        if old is not None and link.serves:
            link.replaces = old
            asyncio.get_running_loop().call_later(DRAIN_S, self._let_go_of_old, link)
        self._emit(LinkUp(peer.node_id, peer.role, restarted))
        self.on_linked(peer)

    def link_frame(self, link: Link, frame: Frame) -> None:
        peer = self.peers[link.peer_id]
        if link.hello.epoch != peer.epoch:
            return  # the last words of a life that another has followed: its numbers would be taken for the new one's
        if link.replaces is not None:
            self._let_go_of_old(link)
        try:
            if frame.type is FrameType.SWIM:
                self.on_datagram(peer, frame.payload)
            elif frame.type is FrameType.SIGNAL:
                self.on_signal(peer, decode_signal(frame.payload))
            elif frame.type is FrameType.CARRY:
                self._on_carried(peer, frame.payload)
            else:
                peer.on_frame(frame)
        except FrameError as error:
            error.reason = error.reason or f"bad-{frame.type.name.lower()}"
            raise

    def link_heard(self, link: Link) -> None:
        self.on_heard(self.peers[link.peer_id])

    def link_silent(self, link: Link) -> None:
        self._context.changed.notify()

    def link_writable(self, link: Link) -> None:
        peer = self.peers[link.peer_id]
        if peer.link is link:
            peer.pump()

    def link_refused(self, link: Link, error: LinkError) -> None:
        peer = self.peer(link.peer_id)
        peer.role, peer.generation = link.peer.role, link.peer.generation
        peer.last_error = peer.refusal = error
        self._context.changed.notify()

    def link_broken(self, link: Link, reason: str) -> None:
        self.counts[reason] += 1

    def link_down(self, link: Link, cause: str, bye: Bye | None) -> None:
        peer = self.peers[link.peer_id]
        self._let_go_of_old(link)
        if link.via and bye is None:
            cause = f"over the relay {self.peer(link.via).name}: {cause}"
        if peer.detach(link, cause, bye):
            _log.info("link to %s is down: %s", peer.name, cause)
            self._emit(LinkDown(peer.node_id, peer.role, cause))
            self.on_unlinked(peer)

    def _let_go_of_old(self, link: Link) -> None:
        old, link.replaces = link.replaces, None
        if old is not None:
            old.close(Bye(ByeReason.DUPLICATE, "another link is kept"))

    def _on_carried(self, carrier: Peer, payload: bytes) -> None:
        """A datagram by way of the relay of our link to its source; or one that we are to pass on as its relay."""
        if len(payload) < 2 * NODE_ID_BYTES:
            raise FrameError("a CARRY frame without a source and a target")
        source, target = payload[:NODE_ID_BYTES].hex(), payload[NODE_ID_BYTES : 2 * NODE_ID_BYTES].hex()
        if target == self._node_id:
            peer = self.peers.get(source)
            if peer is not None and peer.link is not None and peer.link.via == carrier.node_id:
                self.on_datagram(peer, payload[2 * NODE_ID_BYTES :])
            return
        to = self.peers.get(target)
        passes = source == carrier.node_id and to is not None and to.link is not None
        if not passes or to.link.paused or to.link.kind is not LinkKind.DIRECT:
            self.counts["not-carried"] += 1
            return
        self.counts["carried"] += 1
        to.link.write(encode_frame(FrameType.CARRY, payload=payload))

    def _outdated(self, link: Link) -> Bye | None:
        peer, role = self.peer(link.peer_id), link.peer.role
        newest = self._generations.get(role, 0)
        if peer.superseded or link.peer.generation < newest:
            return Bye(ByeReason.SUPERSEDED, f"{role} is generation {newest} now")
        if link.hello.epoch in peer.past_lives or (peer.link is not None and link.hello.epoch < peer.epoch):
            return Bye(ByeReason.SUPERSEDED, "a later process with this node's key has been linked")
        return None


def _rank(link: Link) -> tuple[int, int]:
    return link.kind, 0 if link.dialler_is_lower else 1
