"""A network in virtual time for SWIM cores: the real core and the real packets, a clock that jumps, faults by seed.

Every node runs ppsmoke.cluster.swim.Core as membership.py drives it: due timers first, then the datagram. Each link
and each node draws from a generator of its own, so editing one leaves the others as they were. The same seed gives
the same bytes: `log_hash` covers every command of every node (unless `traced` is False, for it costs as much time).

Faults: loss, delay with Pareto spikes, duplication, reordering (by jitter), cuts both or one way, UDP blocked, freezes,
crashes, restarts (with a clock that may have gone back), late timers.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ppsmoke.cluster.seal import Opener, Sealer, SealError
from ppsmoke.cluster.swim import Core
from ppsmoke.cluster.swim_state import SECOND, Command, Config, EpochRaised, MemberChanged, Send, State, Timer

FIRST_EPOCH_MS = 1_800_000_000_000
LINK_TRIPS = 5  # one-way trips from dialling to READY: TCP, TLS 1.3, HELLO and READY
LINK_SILENCE_S = 15  # a link without a byte for this long is down
REDIAL_MAX_S = 4.0  # after the path is back
FIRST_RETRANSMISSION_S = 0.25  # what a lost segment costs a link, doubling


@dataclass(frozen=True)
class Weather:
    """What happens to a packet on its way. delay_s is the mean one way; pairs differ from half to 1.5 times of it."""

    loss: float = 0.01
    delay_s: float = 0.08
    spike: float = 0.01  # share of packets that are held up
    spike_s: float = 0.15  # by this, times Pareto with exponent 1.6
    duplicate: float = 0.0
    jitter: float = 0.12  # sigma of the log of the delay


@dataclass(frozen=True)
class Change:
    """One MemberChanged that a node reported. really_up: whether the subject was running at that moment."""

    at_s: float
    observer: str
    subject: str
    old: State | None
    new: State
    really_up: bool


@dataclass
class VirtualNode:
    name: str
    index: int
    node_id: str
    core: Core
    up: bool = False
    life: int = 0
    freezes: list[tuple[int, int]] = field(default_factory=list)
    links: set[str] = field(default_factory=set)  # peers (names) in on_link's sense
    events: list[tuple[int, object]] = field(default_factory=list)
    sealer: Sealer | None = None
    opener: Opener | None = None

    def wakes_at(self, now: int) -> int:
        for begin, end in self.freezes:
            if begin <= now < end:
                return end
        return now


@dataclass(frozen=True)
class Cut:
    """Nothing passes (udp_only: no datagram) between the two times."""

    begin: int
    end: int
    udp_only: bool


class VirtualNet:
    """Nodes "node-0", "node-1", ...; node-0 is everybody's seed. Times in the interface are seconds."""

    def __init__(
        self,
        *,
        nodes: int,
        seed: int,
        weather: Weather | None = None,
        config: Config | None = None,
        boot_s: float = 5.0,
        sealed: bool = False,
        links: bool = True,
        traced: bool = True,
    ) -> None:
        self.seed = seed
        self.now = 0
        self.weather = weather or Weather()
        self.config = config or Config()
        self.packets = 0
        self.changes: list[Change] = []
        self.log_hash = hashlib.sha256()
        self._sealed = sealed
        self._with_links = links
        self._traced = traced
        self._noteworthy = True  # something that a stop() may ask for has happened since it was asked
        self._queue: list[tuple[int, int, int, Callable[[], None]]] = []
        self._order = 0
        self._generators: dict[object, random.Random] = {}
        self._cuts: dict[tuple[str, str], list[Cut]] = {}  # by source and target
        self._link_arrival: dict[tuple[str, str], int] = {}
        self.nodes: dict[str, VirtualNode] = {}
        for index in range(nodes):
            name = f"node-{index}"
            node_id = hashlib.sha256(name.encode()).hexdigest()[:16]
            self.nodes[name] = VirtualNode(name, index, node_id, self._new_core(name, node_id, 0))
        self._by_id = {node.node_id: node for node in self.nodes.values()}
        for node in self.nodes.values():
            self.at(boot_s * node.index / nodes, lambda node=node: self._boot(node))

    # Scripts

    def at(self, time_s: float, action: Callable[[], None]) -> VirtualNet:
        self._schedule(round(time_s * SECOND), 2, action)
        return self

    def crash(self, name: str, *, at_s: float) -> VirtualNet:
        """The host vanishes: no RST, no BYE."""
        return self.at(at_s, lambda: self._crash(self.nodes[name]))

    def restart(self, name: str, *, at_s: float, clock_back_s: float = 0.0) -> VirtualNet:
        """An empty memory in a new life; its wall clock may have gone back meanwhile."""
        return self.at(at_s, lambda: self._restart(self.nodes[name], clock_back_s))

    def freeze(self, name: str, *, from_s: float, to_s: float) -> VirtualNet:
        """Neither timers nor packets reach the node; all of it waits until it wakes."""
        self.nodes[name].freezes.append((round(from_s * SECOND), round(to_s * SECOND)))
        return self

    def cut(
        self, source: str, target: str, *, from_s: float, to_s: float, one_way: bool = False, udp_only: bool = False
    ) -> VirtualNet:
        begin, end = round(from_s * SECOND), round(to_s * SECOND)
        for ends in ((source, target),) if one_way else ((source, target), (target, source)):
            self._cuts.setdefault(ends, []).append(Cut(begin, end, udp_only))
        if not udp_only and self._with_links:
            a, b = self.nodes[source], self.nodes[target]
            self.at(from_s + LINK_SILENCE_S, lambda: self._link_silent(a, b))
            redial_s = self._generator("redial", source, target).random() * REDIAL_MAX_S
            self.at(to_s + redial_s, lambda: self._dial(a, b))
        return self

    def isolate(self, name: str, *, from_s: float, to_s: float) -> VirtualNet:
        for other in self.nodes:
            if other != name:
                self.cut(name, other, from_s=from_s, to_s=to_s)
        return self

    def run(self, *, until_s: float, stop: Callable[[], bool] | None = None) -> VirtualNet:
        """Until then, or until stop() holds: it is asked whenever a node has noticed something, booted or crashed."""
        until, self._noteworthy = round(until_s * SECOND), True
        while self._queue and self._queue[0][0] <= until:
            self.now, _, _, action = heapq.heappop(self._queue)
            action()
            if stop is not None and self._noteworthy:
                self._noteworthy = False
                if stop():
                    return self
        self.now = max(self.now, until)
        return self

    # What can be asked

    @property
    def now_s(self) -> float:
        return self.now / SECOND

    def views_of(self, name: str) -> set[State | None]:
        """What the other running nodes think of it."""
        subject = self.nodes[name].node_id
        return {self._view(node, subject) for node in self.running() if node.name != name}

    def running(self) -> list[VirtualNode]:
        return [node for node in self.nodes.values() if node.up]

    def agree_all_live(self) -> bool:
        """Every running node sees every other alive, in its present life."""
        for node in self.running():
            for other in self.running():
                if other is not node:
                    member = node.core.table.get(other.node_id)
                    if member is None or member.state is not State.ALIVE or member.epoch != other.core.epoch:
                        return False
        return True

    def do(self, name: str, verb: Callable[[Core, int], list[Command]]) -> None:
        """Call something on the node's core, now."""
        node = self.nodes[name]
        self._perform(node, verb(node.core, self.now))

    def changes_to(self, state: State, *, after_s: float = 0.0) -> list[Change]:
        return [change for change in self.changes if change.new is state and change.at_s > after_s]

    @staticmethod
    def _view(node: VirtualNode, subject: str) -> State | None:
        member = node.core.table.get(subject)
        return None if member is None else member.state

    # Nodes

    def _new_core(self, name: str, node_id: str, epoch_ms: int) -> Core:
        generator = self._generator("core", name, epoch_ms)
        return Core(self.config, node_id, FIRST_EPOCH_MS + epoch_ms, generator, meta=name.encode())

    def _boot(self, node: VirtualNode) -> None:
        node.up = self._noteworthy = True
        node.links.clear()
        if self._sealed:
            key = b"k" * 32
            node.sealer = Sealer(key, node_id=node.node_id, epoch=node.core.epoch)
            node.opener = Opener(key, node_id=node.node_id)
        self._perform(node, node.core.start(self.now))
        self._perform(node, node.core.join(self.now, [self.nodes["node-0"].node_id]))
        if self._with_links:
            for other in self.running():
                if other is not node:
                    self._dial(node, other)

    def _crash(self, node: VirtualNode) -> None:
        node.up, self._noteworthy = False, True
        node.life += 1

    def _restart(self, node: VirtualNode, clock_back_s: float) -> None:
        for other in self.running():
            other.links.discard(node.name)
        epoch_ms = self.now // 1000 - round(clock_back_s * 1000)
        node.core = self._new_core(node.name, node.node_id, epoch_ms)
        node.events.clear()
        self._boot(node)

    def _perform(self, node: VirtualNode, commands: list[Command]) -> None:
        for command in commands:
            if self._traced:
                self.log_hash.update(repr((self.now, node.index, command)).encode())
            if isinstance(command, Send):
                self._send(node, command)
            elif isinstance(command, Timer):
                token, life = command.token, node.life
                self._schedule(command.at, 0, lambda life=life, token=token: self._timer(node, life, token))
            else:
                node.events.append((self.now, command))
                self._note(node, command)

    def _note(self, node: VirtualNode, event: object) -> None:
        self._noteworthy = True
        if isinstance(event, EpochRaised) and node.sealer is not None:
            node.sealer.raise_epoch(event.epoch)
        if isinstance(event, MemberChanged):
            subject = self._by_id.get(event.node_id)
            name, up = (subject.name, subject.up) if subject else (event.node_id, False)
            self.changes.append(Change(self.now_s, node.name, name, event.old, event.new, up))

    def _timer(self, node: VirtualNode, life: int, token: int) -> None:
        if node.up and node.life == life:
            wake = node.wakes_at(self.now)
            if wake > self.now:
                self._schedule(wake, 0, lambda: self._timer(node, life, token))
            else:
                self._perform(node, node.core.on_timer(self.now, token))

    # Packets

    def _send(self, node: VirtualNode, send: Send) -> None:
        target = self._by_id.get(send.to)
        self.packets += 1
        if target is None:
            return
        if send.via == "link":
            if target.name in node.links and not self._blocked(node, target, udp=False):
                self._carry_by_link(node, target, send.payload)
            return
        generator = self._generator("udp", node.name, target.name)
        if self._blocked(node, target, udp=True) or generator.random() < self.weather.loss:
            return
        payload = node.sealer.seal(send.payload) if node.sealer else send.payload
        copies = 2 if self.weather.duplicate and generator.random() < self.weather.duplicate else 1
        for _ in range(copies):
            self._arrive_later(node, target, payload, "udp", self.now + self._delay(node, target))

    def _carry_by_link(self, node: VirtualNode, target: VirtualNode, payload: bytes) -> None:
        """In order and never lost; what is lost below costs time."""
        generator = self._generator("link", node.name, target.name)
        arrival, wait_s = self.now + self._delay(node, target), FIRST_RETRANSMISSION_S
        while generator.random() < self.weather.loss and wait_s < 5:
            arrival += round(wait_s * SECOND)
            wait_s *= 2
        pair = node.name, target.name
        arrival = self._link_arrival[pair] = max(arrival, self._link_arrival.get(pair, 0))
        self._arrive_later(node, target, payload, "link", arrival)

    def _arrive_later(self, node: VirtualNode, target: VirtualNode, payload: bytes, via: str, at: int) -> None:
        epoch, life = node.core.epoch, target.life
        self._schedule(at, 1, lambda: self._arrive(node, epoch, target, life, payload, via))

    def _arrive(self, node: VirtualNode, epoch: int, target: VirtualNode, life: int, payload: bytes, via: str) -> None:
        if not target.up or target.life != life:
            return
        wake = target.wakes_at(self.now)
        if wake > self.now:
            self._schedule(wake, 1, lambda: self._arrive(node, epoch, target, life, payload, via))
            return
        if via == "udp" and target.opener is not None:
            try:
                _, epoch, _, payload = target.opener.open(payload)
            except SealError:
                return
        self._perform(target, target.core.on_datagram(self.now, node.node_id, epoch, payload, via=via))

    def _delay(self, node: VirtualNode, target: VirtualNode) -> int:
        generator = self._generator("delay", node.name, target.name)
        delay_s = self.weather.delay_s * (0.5 + (7 * (node.index + target.index) % 5) / 4)
        delay_s *= math.exp(generator.gauss(0, self.weather.jitter))
        if generator.random() < self.weather.spike:
            delay_s += generator.paretovariate(1.6) * self.weather.spike_s
        return round(delay_s * SECOND)

    def _blocked(self, node: VirtualNode, target: VirtualNode, *, udp: bool) -> bool:
        cuts = self._cuts.get((node.name, target.name), ())
        return any(cut.begin <= self.now < cut.end and (udp or not cut.udp_only) for cut in cuts)

    # Links

    def _dial(self, a: VirtualNode, b: VirtualNode) -> None:
        trips = sum(self._delay(*((a, b) if trip % 2 == 0 else (b, a))) for trip in range(LINK_TRIPS))
        lives = a.life, b.life
        self._schedule(self.now + trips, 2, lambda: self._linked(a, b, lives))

    def _linked(self, a: VirtualNode, b: VirtualNode, lives: tuple[int, int]) -> None:
        blocked = self._blocked(a, b, udp=False) or self._blocked(b, a, udp=False)
        if not (a.up and b.up) or lives != (a.life, b.life) or blocked or b.name in a.links:
            return
        wake = max(a.wakes_at(self.now), b.wakes_at(self.now))
        if wake > self.now:
            self._schedule(wake, 2, lambda: self._linked(a, b, lives))
            return
        a.links.add(b.name)
        b.links.add(a.name)
        for node, peer in ((a, b), (b, a)):
            core = peer.core
            self._perform(node, node.core.on_link(self.now, peer.node_id, up=True, epoch=core.epoch, meta=core.meta))

    def _link_silent(self, a: VirtualNode, b: VirtualNode) -> None:
        if not (self._blocked(a, b, udp=False) or self._blocked(b, a, udp=False)):
            return
        for node, peer in ((a, b), (b, a)):
            if node.up and peer.name in node.links:
                node.links.discard(peer.name)
                self._perform(node, node.core.on_link(self.now, peer.node_id, up=False))

    # The clock

    def _schedule(self, at: int, rank: int, action: Callable[[], None]) -> None:
        """rank: at one moment timers (0) come before packets (1) and scripts (2), as in membership.py."""
        self._order += 1
        heapq.heappush(self._queue, (max(at, self.now), rank, self._order, action))

    def _generator(self, *key: object) -> random.Random:
        if key not in self._generators:
            self._generators[key] = random.Random(hashlib.sha256(f"{self.seed}/{key}".encode()).digest())
        return self._generators[key]
