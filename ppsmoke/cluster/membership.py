"""Membership in the real world: owns the UDP sockets and the one timer, seals datagrams, chooses an address or a link
for each packet, and alone reads a clock. What it all means is decided by the core (swim.py)."""

from __future__ import annotations

import asyncio
import functools
import heapq
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from ppsmoke.cluster.machine import Machine
from ppsmoke.cluster.names import NameEntry
from ppsmoke.cluster.seal import Opener, Sealer, SealError
from ppsmoke.cluster.swim import Core
from ppsmoke.cluster.swim_state import Command, Config, EpochRaised, Event, Send, State, Timer, UdpBlocked
from ppsmoke.cluster.udp_ports import Port, UdpAddress, UdpPorts

LINGER_S = 2.0  # after leaving, pings are still answered this long
MAX_ADDRESSES = 4  # of one peer that are tried at once; copies of a datagram are refused by its replay window
_EPOCH = Struct("!Q")  # before a packet that goes over a link


@dataclass(frozen=True)
class MemberView:
    """What we believe of a member, ourselves included. quiet_s: since its last sign of life to us, None if none."""

    node_id: str
    state: State
    epoch: int
    incarnation: int
    meta: bytes
    quiet_s: float | None


class _Observed(NamedTuple):
    """A peer's newest datagram: its epoch and counter, where it came from, and to which port of ours."""

    order: tuple[int, int]
    source: UdpAddress
    port: Port | None


class Membership:
    """One node's membership. Callbacks run in the event loop, never from within a call into the core.

    link_send(peer, data): put data on the link to the peer as a droppable datagram; False if there is no link.
    udp_candidates(meta): where a member can be reached by UDP, by what it says of itself (addresses, not names).
    udp: where to listen, None for no UDP at all.
    """

    def __init__(
        self,
        *,
        node_id: str,
        cluster_key: bytes,
        link_send: Callable[[str, bytes], bool],
        on_event: Callable[[Event], None],
        udp: UdpAddress | None = ("127.0.0.1", 0),
        meta: bytes = b"",
        udp_candidates: Callable[[bytes], Sequence[UdpAddress]] = lambda meta: (),
        config: Config | None = None,
        epoch: int | None = None,
        machine: Machine | None = None,
    ) -> None:
        machine = machine or Machine()
        epoch = machine.epoch_ms() if epoch is None else epoch
        config = config or Config(udp=udp is not None)
        self.node_id = node_id
        self._loop = asyncio.get_running_loop()
        self._clock = machine.boot_us
        self._link_send = link_send
        self._on_event = on_event
        self._udp_candidates = udp_candidates
        self._listen = udp
        self._core = Core(config, node_id, epoch, machine.random(), meta=meta)
        self._sealer = Sealer(cluster_key, node_id=node_id, epoch=epoch)
        self._opener = Opener(cluster_key, node_id=node_id)
        self._counts: Counter[str] = Counter()
        self._told: dict[str, UdpAddress] = {}  # by the link's HELLO
        self._observed: dict[str, _Observed] = {}  # by the newest datagram that came
        self._timers: list[tuple[int, int]] = []
        self._handle: asyncio.TimerHandle | None = None
        self._handle_at = 0  # microseconds; the handle may be early, never late
        self._ports = UdpPorts(self.datagram_received)
        self._from_fresh = False  # whether the latest datagram to a peer that UDP does not reach left the fresh port
        self._closed = False

    # Life

    async def start(self) -> None:
        """Listen and begin. Raises LinkError if the UDP address cannot be had."""
        if self._listen is not None:
            await self._ports.open(self._listen)
        self._do(self._core.start(self._clock()))

    async def leave(self, *, linger_s: float = LINGER_S) -> None:
        """Tell everybody that we go, and answer for a while so that nobody takes it for a crash."""
        if not self._closed:
            self._do(self._core.leave(self._enter()))
            await asyncio.sleep(linger_s)

    async def close(self) -> None:
        """Silent from now on; whoever was not told by leave() will find us dead."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        await self._ports.close()

    @property
    def udp_port(self) -> int | None:
        return self._ports.number

    @property
    def epoch(self) -> int:
        """Which life we are in; belongs into HELLO."""
        return self._core.epoch

    # What happens on links

    def link_up(self, peer: str, *, epoch: int, udp: UdpAddress | None = None, meta: bytes = b"") -> None:
        """A link stands; epoch and meta are what the peer's HELLO said, udp where it hears datagrams."""
        if udp is not None and _usable(udp):
            self._told[peer] = udp
        self._do(self._core.on_link(self._enter(), peer, up=True, epoch=epoch, meta=meta))

    def link_down(self, peer: str) -> None:
        self._do(self._core.on_link(self._enter(), peer, up=False))

    def on_link_datagram(self, peer: str, data: bytes) -> None:
        """What the peer's link_send put on the link."""
        if len(data) < _EPOCH.size:
            self._counts["too-short"] += 1
            return
        (epoch,) = _EPOCH.unpack_from(data)
        self._do(self._core.on_datagram(self._enter(), peer, epoch, data[_EPOCH.size :], via="link"))

    def note_life(self, peer: str) -> None:
        """A frame of the peer came over its link: cheap, call it for each."""
        self._do(self._core.note_life(self._enter(), peer))

    # Names and members

    def join(self, seeds: Iterable[tuple[str, UdpAddress]]) -> None:
        """Ask these nodes, at these addresses, for all they know."""
        seeds = list(seeds)
        self._told.update({node_id: address for node_id, address in seeds if _usable(address)})
        self._do(self._core.join(self._enter(), [node_id for node_id, _ in seeds]))

    def register(self, name: str, value: bytes, *, generation: int = 0) -> None:
        """Tell the cluster that this node owns the name. Raises ValueError if name or value is too long."""
        self._do(self._core.register(self._enter(), name, value, generation=generation))

    def unregister(self, name: str) -> None:
        self._do(self._core.register(self._enter(), name, b"", deleted=True))

    def lookup(self, name: str) -> list[NameEntry]:
        """Entries of owners that are alive or suspected, the best first; the caller checks the owner's role."""
        return self._core.lookup(name)

    def set_meta(self, meta: bytes) -> None:
        self._do(self._core.set_meta(self._enter(), meta))

    def meta_of(self, node_id: str) -> bytes | None:
        """What the member says of itself; None if we do not know it."""
        if node_id == self.node_id:
            return self._core.meta
        member = self._core.table.get(node_id)
        return None if member is None else member.meta

    def state_of(self, node_id: str) -> State | None:
        if node_id == self.node_id:
            return State.ALIVE
        member = self._core.table.get(node_id)
        return None if member is None else member.state

    def members(self) -> list[MemberView]:
        """Everybody we know of, the dead and ourselves included, by id."""
        core, now = self._core, self._core.own_time
        views = [MemberView(core.node_id, State.ALIVE, core.epoch, core.incarnation, core.meta, 0.0)]
        for m in core.table.members.values():
            quiet_s = None if m.heard is None else (now - m.heard) / 1e6
            views.append(MemberView(m.node_id, m.state, m.epoch, m.incarnation, m.meta, quiet_s))
        return sorted(views, key=lambda view: view.node_id)

    @property
    def datagram_counts(self) -> Counter[str]:
        """How many datagrams were opened, and how many refused by their seal or dropped, by reason."""
        return self._counts + self._opener.counts

    @property
    def gossip_counts(self) -> Counter[str]:
        """What was said by members and not believed, by reason."""
        return self._core.counts + Counter({"too-many-names": self._core.names.refused})

    @property
    def counts(self) -> Counter[str]:
        """Both together."""
        return self.datagram_counts + self.gossip_counts

    # The driver

    def _enter(self) -> int:
        """Timers before anything else: the core learns first if we were late. The time."""
        now = self._clock()
        while self._timers and self._timers[0][0] <= now and not self._closed:
            _, token = heapq.heappop(self._timers)
            self._do(self._core.on_timer(now, token))
        return now

    def _do(self, commands: list[Command]) -> None:
        events = []
        for command in commands:
            if isinstance(command, Send):
                self._transmit(command)
            elif isinstance(command, Timer):
                heapq.heappush(self._timers, (command.at, command.token))
            else:
                if isinstance(command, EpochRaised):
                    self._sealer.raise_epoch(command.epoch)
                events.append(command)
        self._arm()
        for event in events:
            if isinstance(event, UdpBlocked):
                if not self._addresses(event.node_id):
                    continue  # it never was to be reached by UDP
                self._ports.want_fresh()
            self._on_event(event)

    def _arm(self) -> None:
        """One timer in the loop, for the earliest of the core's."""
        if not self._timers or self._closed:
            return
        at = self._timers[0][0]
        if self._handle is not None:
            if self._handle_at <= at:
                return
            self._handle.cancel()
        self._handle_at = at
        delay_s = max(0, at - self._clock()) / 1e6
        self._handle = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._handle = None
        self._enter()
        self._arm()

    def _transmit(self, send: Send) -> None:
        addresses = self._addresses(send.to) if send.via == "udp" else []
        if addresses:
            datagram = self._sealer.seal(send.payload)
            port = self._port_towards(send.to)
            for address in addresses:
                if not self._closed and not self._ports.send(datagram, address, port):
                    self._counts["dropped-unsent"] += 1
        elif send.via == "link" or not self._core.path(send.to).udp_blocked:
            if not self._link_send(send.to, _EPOCH.pack(self._core.epoch) + send.payload):
                self._counts["unreachable"] += 1

    def _port_towards(self, peer: str) -> Port | None:
        """The port that its newest datagram came to. While UDP does not reach it, the fresh one every other time."""
        if self._ports.fresh is not None and self._core.path(peer).udp_blocked:
            self._from_fresh = not self._from_fresh
            return self._ports.fresh if self._from_fresh else self._ports.listening
        return self._observed[peer].port if peer in self._observed else None

    def _addresses(self, peer: str) -> list[UdpAddress]:
        """Where the peer was last heard from; if that is long ago or never was, everywhere it may be."""
        if self._ports.listening is None:
            return []
        found: list[UdpAddress] = []
        if peer in self._observed:
            found.append(self._observed[peer].source)
            heard = self._core.path(peer).udp_heard
            if heard is not None and self._core.own_time - heard < self._core.config.udp_silence:
                return found
        if peer in self._told:
            found.append(self._told[peer])
        if (member := self._core.table.get(peer)) is not None and member.meta:
            found += [address for address in self._udp_candidates(member.meta) if _usable(address)]
        return list(dict.fromkeys(found))[:MAX_ADDRESSES]

    def datagram_received(self, data: bytes, source: UdpAddress, port: Port | None = None) -> None:
        """From a socket. A source is believed only for where to reply, and only by the newest datagram."""
        try:
            opened = self._opener.open(data)
        except SealError:
            return  # counted by its reason; strangers get no answer
        order = (opened.epoch, opened.counter)
        known = self._observed.get(opened.sender)
        if known is None or order > known.order:
            self._observed[opened.sender] = _Observed(order, source, port)
        self._do(self._core.on_datagram(self._enter(), opened.sender, opened.epoch, opened.payload, via="udp"))


@functools.lru_cache(maxsize=256)
def _usable(address: UdpAddress) -> bool:
    """An address one can send to: a literal, not 0.0.0.0 (a peer that bound it would have us talk to ourselves)."""
    host, port = address
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return 0 < port < 1 << 16 and not ip.is_unspecified and not ip.is_multicast
