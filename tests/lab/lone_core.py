"""One SWIM core on a bench: packets are put in by hand, time goes where the test says, and all that leaves is kept."""

from __future__ import annotations

import heapq
import random
from typing import TypeVar

from ppsmoke.cluster.swim import Core
from ppsmoke.cluster.swim_packets import Body, Gossip, MemberUpdate, Packet, Update, decode, encode
from ppsmoke.cluster.swim_state import SECOND, Command, Config, Event, MemberChanged, Send, State, Timer, Via

EPOCH = 1_800_000_000_000
ME = "00000000000000ee"
T = TypeVar("T")


def peer_id(letter: str) -> str:
    """Ids that sort like their letters."""
    return f"{ord(letter):016x}"


class LoneCore:
    """`sent` has (seconds, to, packet, via); `events` has (seconds, event)."""

    def __init__(self, peers: str = "", *, config: Config | None = None, seed: int = 0, meta: bytes = b"me") -> None:
        self.core = Core(config or Config(), ME, EPOCH, random.Random(seed), meta=meta)
        self.now = 0
        self.timers: list[tuple[int, int]] = []
        self.sent: list[tuple[float, str, Packet, Via]] = []
        self.events: list[tuple[float, Event]] = []
        self.perform(self.core.start(0))
        for letter in peers:
            self.hear(letter, Gossip(), alive(letter))

    def perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Timer):
                heapq.heappush(self.timers, (command.at, command.token))
            elif isinstance(command, Send):
                self.sent.append((self.now / SECOND, command.to, decode(command.payload), command.via))
            else:
                self.events.append((self.now / SECOND, command))

    def hear(self, letter: str, body: Body, *updates: Update, **how: object) -> LoneCore:
        """A packet from a peer; how: epoch, incarnation, hears_udp, via."""
        epoch, via = how.pop("epoch", EPOCH), how.pop("via", "udp")
        packet = Packet(how.pop("incarnation", 0), how.pop("hears_udp", True), body, updates)
        assert not how
        self.perform(self.core.on_datagram(self.now, peer_id(letter), epoch, encode(packet), via=via))
        return self

    def pass_time(self, until_s: float) -> LoneCore:
        until = round(until_s * SECOND)
        while self.timers and self.timers[0][0] <= until:
            at, token = heapq.heappop(self.timers)
            self.now = max(self.now, at)
            self.perform(self.core.on_timer(self.now, token))
        self.now = max(self.now, until)
        return self

    def freeze(self, until_s: float) -> LoneCore:
        """Timers that were due meanwhile come late, all at once."""
        self.now = round(until_s * SECOND)
        while self.timers and self.timers[0][0] <= self.now:
            _, token = heapq.heappop(self.timers)
            self.perform(self.core.on_timer(self.now, token))
        return self

    def state(self, letter: str) -> State | None:
        member = self.core.table.get(peer_id(letter))
        return None if member is None else member.state

    def sent_to(self, letter: str, kind: type[T]) -> list[tuple[float, T]]:
        return [(at, p.body) for at, to, p, _ in self.sent if to == peer_id(letter) and isinstance(p.body, kind)]

    def told(self, letter: str) -> list[Update]:
        """All updates that went to the peer."""
        return [update for _, to, packet, _ in self.sent if to == peer_id(letter) for update in packet.updates]

    def of(self, kind: type[T]) -> list[T]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def became(self, letter: str) -> list[tuple[float, State]]:
        changes = [(at, e) for at, e in self.events if isinstance(e, MemberChanged)]
        return [(at, e.new) for at, e in changes if e.node_id == peer_id(letter)]


def alive(letter: str, incarnation: int = 0, *, epoch: int = EPOCH, meta: bytes = b"m") -> MemberUpdate:
    return MemberUpdate(State.ALIVE, peer_id(letter), epoch, incarnation, meta=meta)


def suspect(letter: str, by: str, incarnation: int = 0, *, epoch: int = EPOCH) -> MemberUpdate:
    return MemberUpdate(State.SUSPECT, peer_id(letter), epoch, incarnation, peer_id(by))


def dead(letter: str, by: str, incarnation: int = 0, *, epoch: int = EPOCH) -> MemberUpdate:
    return MemberUpdate(State.DEAD, peer_id(letter), epoch, incarnation, peer_id(by))
