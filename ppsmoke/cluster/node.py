"""A node of the cluster: mailboxes, messages that arrive once, names that count only with the role, links kept up.

The story of `listening` and `gather` is what a run sees of the network; the rest of the room is behind them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

from ppsmoke.cluster import swim_state
from ppsmoke.cluster.addresses import Address, Candidate, Delivery, Endpoint
from ppsmoke.cluster.advertising import meta_of, outward_host, udp_candidates
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.counters import REPORT_EVERY_S, Watch, summed
from ppsmoke.cluster.events import Event, LinkInfo, Member, MemberChanged, PortCheck
from ppsmoke.cluster.gathering import REACH_WITHIN_S, Gathering
from ppsmoke.cluster.guarding import Guard
from ppsmoke.cluster.handshake import Bye, ByeReason, decode_candidates
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.machine import Machine
from ppsmoke.cluster.mailbox import Mailbox, Mailboxes
from ppsmoke.cluster.membership import Membership
from ppsmoke.cluster.peer import LINK_GRACE_S, Peer, PeerContext
from ppsmoke.cluster.reach import Reach
from ppsmoke.cluster.relay import RelayInfo
from ppsmoke.cluster.resolving import Resolver
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.session import WINDOW_BYTES
from ppsmoke.cluster.sockets import LinkMaker, Listener
from ppsmoke.cluster.waking import Waking
from ppsmoke.errors import FrameError, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap, to_the_end

FLUSH_S = 2.0  # a node that ends waits this long for its last messages to be acknowledged
CLOSE_BUDGET_S = 10.0
MAX_EVENTS = 1000  # kept for a subscriber that does not look

_log = logging.getLogger("ppsmoke.cluster")


class Node:
    @classmethod
    @asynccontextmanager
    async def listening(
        cls,
        identity: Identity,
        *,
        cluster_key: bytes,
        tcp: tuple[str, int] = ("127.0.0.1", 0),
        udp: tuple[str, int] | None = ("127.0.0.1", 0),
        code_hash: str,
        model: str,
        may_own: Callable[[str, str], bool],
        advertise: Sequence[Candidate] = (),
        timing: LinkTiming | None = None,
        link_grace_s: float = LINK_GRACE_S,
        window_bytes: int = WINDOW_BYTES,
        swim: swim_state.Config | None = None,
        machine: Machine | None = None,
    ) -> AsyncIterator[Node]:
        """A node for this block: when the block ends its last messages are flushed, its peers are told, and no task
        or socket of it is left. udp None: membership goes over the links alone. Raises LinkError if it cannot listen.

        may_own(name, role): whether the holder of that role may own that name."""
        machine = machine or Machine()
        hello = (code_hash, model)
        node = cls(identity, machine, link_grace_s=link_grace_s, window_bytes=window_bytes, hello=hello)
        maker = LinkMaker(identity, cluster_key, node._roster, timing or LinkTiming(), machine)
        node._maker = maker
        node._listener = Listener(*tcp, maker)
        node._reaching = Reach(node._roster, maker, node._changed, host=tcp[0], learn=node._learn_candidates)
        node._membership = Membership(
            node_id=node.node_id,
            cluster_key=cluster_key,
            link_send=node._roster.send_datagram,
            on_event=node._on_membership,
            udp=udp,
            udp_candidates=udp_candidates,
            config=swim,
            epoch=node._epoch,
            machine=machine,
        )
        node._resolver = Resolver(node, node._membership.lookup, may_own, node._roster, node._changed, node._reach)
        try:
            await node._open(advertise)
            yield node
        finally:
            await to_the_end(node._close(), doing="closing the node", within_s=CLOSE_BUDGET_S)

    def __init__(
        self,
        identity: Identity,
        machine: Machine,
        *,
        link_grace_s: float,
        window_bytes: int,
        hello: tuple[str, str],
    ) -> None:
        self.node_id = identity.node_id
        self.role = identity.role
        self._changed, self._flushed = Signal(), Signal()
        self._mailboxes = Mailboxes(self._changed)
        self._watch = Watch(_log)
        self._watching: asyncio.Task[None] | None = None
        self.port_checks: list[PortCheck] = []  # what gather() found of mapped ports
        self._watchers: list[asyncio.Queue[Event]] = []
        self._epoch = machine.epoch_ms()
        context = PeerContext(
            epoch=self._epoch,
            window_bytes=window_bytes,
            link_grace_s=link_grace_s,
            deliver=self._mailboxes.deliver,
            changed=self._changed,
            flushed=self._flushed,
        )
        code_hash, model = hello
        self._roster = Roster(self.node_id, context, code_hash=code_hash, model=model, emit=self._emit)
        self._waking = Waking(self._roster, clock=machine.boot_us)
        self._guard = Guard(
            self._roster,
            self._changed,
            grace_s=link_grace_s,
            is_dead=lambda node_id: self._membership.state_of(node_id) is swim_state.State.DEAD,
        )
        self._maker: LinkMaker
        self._listener: Listener
        self._reaching: Reach
        self._resolver: Resolver
        self._membership: Membership

    def __repr__(self) -> str:
        return f"<Node {self.role} {self.node_id}>"

    # --- what it is

    @property
    def tcp_port(self) -> int:
        return self._listener.port

    @property
    def udp_port(self) -> int | None:
        return self._membership.udp_port

    @property
    def counts(self) -> Counter[str]:
        """What became of the sockets that others opened here: accepted, strangers, evicted, refused, linked."""
        return self._listener.counts

    def counters(self) -> Counter[str]:
        """All that has been let in, passed on and refused here, by the names of counters.py."""
        return summed(
            (
                ("door", self._listener.counts),
                ("handshake", self._maker.counts),
                ("link", self._roster.counts),
                ("link", self._mailboxes.counts),
                ("link", self._resolver.counts),
                *self._reaching.counters(),
                ("datagram", self._membership.datagram_counts),
                ("gossip", self._membership.gossip_counts),
            )
        )

    @property
    def last_refusal(self) -> str:
        """Why the latest handshake of a socket opened here failed."""
        return self._listener.last_refusal

    @property
    def seed_addr(self) -> str:
        """What another node needs to dial this one: "<node id>@host:port[,host:port...]"."""
        where = [f"{candidate.host}:{candidate.tcp_port}" for candidate in self._roster.candidates]
        return f"{self.node_id}@{','.join(where)}"

    def members(self) -> list[Member]:
        """Everybody known, this node first."""
        found = [Member(self.node_id, self.role, "alive", True)]
        for view in self._membership.members():
            if view.node_id != self.node_id:
                peer = self._roster.peers.get(view.node_id)
                linked = peer is not None and peer.link is not None
                found.append(Member(view.node_id, peer.role if peer else "", view.state.name.lower(), linked))
        return found

    def links(self) -> list[LinkInfo]:
        """The link to each peer that is up, by role."""
        found = []
        for peer in sorted(self._roster.peers.values(), key=lambda peer: peer.name):
            if (link := peer.link) is not None:
                rtt_ms = None if link.rtt_s is None else link.rtt_s * 1000
                found.append(
                    LinkInfo(
                        peer.node_id,
                        peer.role,
                        link.kind.name.lower(),
                        rtt_ms,
                        link.bytes_in,
                        link.bytes_out,
                        via=self._roster.peer(link.via).name if link.via else "",
                        reason="; ".join(filter(None, (peer.path_reason, peer.upgrades.note))),
                    )
                )
        return found

    def stood_still(self) -> str:
        """That this process or this machine slept lately, and how long; "" if it did not."""
        return self._waking.stood_still()

    def relayed(self) -> list[RelayInfo]:
        """The pairs of other nodes whose bytes this one passes on."""
        return self._reaching.relay.pairs()

    def subscribe(self) -> asyncio.Queue[Event]:
        """Events from now on; the oldest are dropped beyond MAX_EVENTS."""
        queue: asyncio.Queue[Event] = asyncio.Queue(MAX_EVENTS)
        self._watchers.append(queue)
        return queue

    # --- messages

    def mailbox(self, name: str) -> Mailbox:
        """The mailbox of that name on this node; what came before it was asked for lies in it."""
        return self._mailboxes.ask_for(name)

    def address(self, mailbox: str) -> Address:
        return Address(self.node_id, mailbox)

    async def send(self, to: Address, payload: bytes | Sequence[bytes]) -> None:
        """Deliver once, in order per receiving node, whatever its links do meanwhile. Returns when the message is in
        the bounded window. Raises LinkLost if the peer is, or gets, out of reach for link_grace_s."""
        pieces = [payload] if isinstance(payload, (bytes, bytearray, memoryview)) else payload
        if to.node_id == self.node_id:
            mailbox = self.mailbox(to.mailbox)
            while mailbox.full:
                await self._changed.wait()
            mailbox.put(Delivery(self.node_id, self.role, b"".join(pieces)))
            return
        peer = self._roster.peer(to.node_id)
        if peer.link is None:
            self._reach(peer)
        await peer.send(to.mailbox, pieces)

    # --- names

    def register(self, name: str, mailbox: str, *, generation: int = 0) -> None:
        """Tell the cluster that this node answers to name. Others believe it if its certificate's role may own it."""
        self._membership.register(name, mailbox.encode(), generation=generation)

    async def resolve(self, name: str) -> Address:
        """The mailbox of the name's best rightful owner, once there is a link to it; the caller has the deadline."""
        return await self._resolver.resolve(name)

    # --- links

    async def dial(self, endpoint: Endpoint) -> None:
        """Keep a link to it from now on; returns when it is up for the first time. An older generation of its role is
        dropped. Raises LinkError if the two sides do not fit together, or a newer generation supersedes this one."""
        peer = self._roster.peer(endpoint.node_id)
        peer.endpoint, peer.left, peer.refusal = endpoint, None, None
        self._roster.supersede(endpoint.role, endpoint.generation)
        self._reaching.dialler.keep(peer)
        while peer.link is None:
            if peer.refusal is not None:
                raise peer.refusal
            if peer.superseded:
                raise LinkError(f"{endpoint.role} has been replaced")
            await self._changed.wait()

    async def gather(
        self,
        endpoints: AsyncIterator[Endpoint],
        *,
        size: int,
        deadline: Deadline,
        reach_within_s: float | None = REACH_WITHIN_S,
    ) -> None:
        """Dial each endpoint as it becomes known; returns when `size` members, this node among them, are alive and
        linked, and mapped ports have been dialled back (port_checks). An endpoint without a host is one that cannot be
        dialled. reach_within_s: how long a node whose endpoint is known, because it listens, may be out of reach.
        Raises LinkError that says who must change what, or DeadlineExceeded that names who is missing and why."""
        gathering = Gathering(
            self._roster, self._changed, dial=self.dial, is_alive=self._is_alive, reach_within_s=reach_within_s
        )
        await gathering.run(endpoints, size=size, deadline=deadline)
        linked = [peer for peer in self._roster.peers.values() if peer.link is not None]
        self.port_checks = await self._reaching.port_checks.run(self.role, linked)
        for check in self.port_checks:
            _log.log(logging.WARNING if check.cause else logging.INFO, "%s", check)

    async def guard(self, peers: Collection[str]) -> NoReturn:
        """Raises LinkLost when one of these node ids has had no link for link_grace_s, has left, or has restarted."""
        return await self._guard.watch(peers)

    # --- behind the scenes

    async def _open(self, advertise: Sequence[Candidate]) -> None:
        await self._membership.start()
        own = Candidate("host", outward_host(self._listener.host), self.tcp_port, self.udp_port)
        self._roster.candidates = tuple(dict.fromkeys((own, *advertise)))
        self._roster.udp_port = self.udp_port
        self._roster.on_linked = self._on_linked
        self._roster.on_unlinked = self._on_unlinked
        self._roster.on_heard = lambda peer: self._membership.note_life(peer.node_id)
        self._roster.on_datagram = lambda peer, data: self._membership.on_link_datagram(peer.node_id, data)
        self._membership.set_meta(meta_of(self._roster.candidates))
        self._listener.start()
        self._waking.start()
        self._watching = asyncio.ensure_future(self._tell_refusals())
        self._watching.set_name("refusals")

    async def _tell_refusals(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._watch.tell(self.counters())

    async def _close(self) -> None:
        self._waking.close()
        if self._watching is not None:
            await cancel_and_reap(self._watching)
        self._watch.tell(self.counters())
        await self._listener.close()
        await self._reaching.close()
        await self._membership.leave(linger_s=0.0)
        await self._flush()
        await self._membership.close()
        for link in list(self._maker.links):
            link.close(Bye(ByeReason.LEAVING, "its node has ended"))
        open_links = [link.closed for link in self._maker.links]
        if open_links:
            await asyncio.wait(open_links)  # at most the time of a BYE
        for peer in self._roster.peers.values():
            peer.close()

    async def _flush(self) -> None:
        until = asyncio.get_running_loop().time() + FLUSH_S
        for link in self._maker.links:
            if link.state == "up":
                link.ping()  # what the peer owes us comes before its answer
        while any(peer.link is not None and not peer.session.idle for peer in self._roster.peers.values()):
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            await self._flushed.wait(left_s)

    def _reach(self, peer: Peer) -> None:
        """Have a link to it if it can be had."""
        self._reaching.dialler.keep(peer)

    def _learn_candidates(self, peer: Peer) -> None:
        meta = self._membership.meta_of(peer.node_id)
        try:
            gossiped = decode_candidates(meta) if meta else ()
        except FrameError:
            return
        if gossiped != peer.gossiped:
            peer.gossiped = gossiped
            self._changed.notify()

    def _is_alive(self, peer: Peer) -> bool:
        return self._membership.state_of(peer.node_id) in (swim_state.State.ALIVE, swim_state.State.SUSPECT)

    def _on_membership(self, event: swim_state.Event) -> None:
        if isinstance(event, swim_state.MemberChanged):
            for peer in self._roster.peers.values():
                if peer.link is None:
                    self._learn_candidates(peer)
            self._reaching.news_of(event.node_id)
            peer = self._roster.peers.get(event.node_id)
            if peer is not None:
                lives = event.new in (swim_state.State.ALIVE, swim_state.State.SUSPECT)
                peer.on_membership(alive_epoch=event.epoch if lives else 0)
            self._emit(MemberChanged(event.node_id, peer.role if peer else "", event.new.name.lower()))
        elif isinstance(event, swim_state.UdpBlocked):
            _log.info("UDP is blocked (%s %s): membership goes over the link", event.direction, event.node_id)
        self._changed.notify()

    def _on_linked(self, peer: Peer) -> None:
        self._reaching.dialler.keep(peer)
        meta = meta_of(peer.candidates)
        self._membership.link_up(peer.node_id, epoch=peer.epoch, udp=peer.udp_address(), meta=meta)

    def _on_unlinked(self, peer: Peer) -> None:
        self._membership.link_down(peer.node_id)

    def _emit(self, event: Event) -> None:
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)
