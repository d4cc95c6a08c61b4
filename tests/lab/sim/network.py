"""The simulated internet: who is behind which address, how packets fare between two machines, what a NAT lets in."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.lab.sim.world import World

if TYPE_CHECKING:
    from tests.lab.sim.datagrams import DatagramTransport
    from tests.lab.sim.machine import SimMachine
    from tests.lab.sim.streams import StreamSocket

# open: a public address. mapped: behind a NAT that forwards one TCP and one UDP port. keeps: behind one that keeps a
# connection's port, so that a hole can be punched. random: behind one that changes it per destination.
Nat = Literal["open", "mapped", "keeps", "random"]
Address = tuple[str, int]

RTO_S = 0.25  # the first retransmission of a lost segment; doubles
RTO_MOST_S = 8.0
BANDWIDTH_BYTES_PER_S = 20e6
LISTENING_UDP = 7071  # the port of every node's first socket
UDP_HOLE_S = 60.0  # a NAT forgets a flow of datagrams after this


@dataclass
class Edge:
    """The way from one machine to another. Counters, because faults overlap."""

    generator: random.Random
    delay_s: float
    cuts: int = 0
    udp_cuts: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    slower: float = 1.0

    def trip_s(self) -> float:
        """One way, with jitter and now and then a spike."""
        draw = self.generator.random()
        delay_s = self.delay_s * self.slower * (0.9 + 0.2 * draw)
        if draw > 0.995:
            delay_s += min(1.0, 0.15 * self.generator.paretovariate(1.6))
        return delay_s

    def segment_s(self) -> float:
        """One way for a TCP segment, which is late where a datagram would be lost."""
        delay_s, wait_s = self.trip_s(), RTO_S
        while self.loss and self.generator.random() < self.loss and wait_s < RTO_MOST_S:
            delay_s += wait_s
            wait_s *= 2
        return delay_s

    def loses(self) -> bool:
        return self.cuts > 0 or (self.loss > 0 and self.generator.random() < self.loss)


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.machines: list[SimMachine] = []
        self._by_ip: dict[str, SimMachine] = {}
        self._edges: dict[tuple[int, int], Edge] = {}  # by both machines' index

    def add(self, machine: SimMachine) -> None:
        self.machines.append(machine)
        self._by_ip[machine.ip] = self._by_ip[machine.public] = machine

    def edge(self, source: SimMachine, target: SimMachine) -> Edge:
        found = self._edges.get((source.index, target.index))
        if found is None:
            pair = self.world.random("delay", *sorted((source.name, target.name)))
            generator = self.world.random("edge", source.name, target.name)
            found = self._edges[source.index, target.index] = Edge(
                generator, pair.choice((0.0005, 0.01, 0.04, 0.06, 0.1))
            )
        return found

    def find(self, source: SimMachine, host: str) -> SimMachine | None:
        """Whose address that is, as seen from there; a private one leads nowhere from another site."""
        machine = self._by_ip.get(host)
        if machine is None or (host == machine.ip != machine.public and machine.site != source.site):
            return None
        return machine

    def seen(self, machine: SimMachine, port: int, remote: Address) -> Address:
        """Machine's port as the remote address sees it."""
        target = self._by_ip.get(remote[0])
        if machine.nat == "open" or (target is not None and target.site == machine.site and remote[0] == target.ip):
            return machine.ip, port
        if machine.nat == "keeps":
            return machine.public, port
        return machine.public, machine.nat_port(port, remote)

    # --- TCP

    def syn(self, sock: StreamSocket) -> None:
        """One SYN leaves; it may be lost, and the socket sends another."""
        source, remote = sock.machine, sock.remote
        target = self.find(source, remote[0])
        if target is None or self.edge(source, target).loses():
            return
        seen = self.seen(source, sock.local[1], remote)
        self.world.at(self.world.now + self.edge(source, target).trip_s(), self._syn_arrives, sock, seen, target)

    def _syn_arrives(self, sock: StreamSocket, seen: Address, target: SimMachine) -> None:
        if target.off or not sock.is_connecting:
            return
        if sock.peer is not None:  # a SYN that was repeated: the answer was late or lost
            self._answer(sock, target)
            return
        other = self._simultaneous(target, seen, sock.remote)
        if other is not None:
            sock.pair(other)
            for one in (sock, other):
                trip_s = self.edge(target, sock.machine).trip_s()
                self.world.at(self.world.now + trip_s, one.established)
            return
        listening = target.listener(sock.remote)
        if listening is not None:
            sock.pair(listening.half_open(seen))
            self._answer(sock, target)
        elif target.nat == "open" and not self.edge(target, sock.machine).loses():
            trip_s = self.edge(target, sock.machine).trip_s()
            self.world.at(self.world.now + trip_s, sock.refused)

    def _answer(self, sock: StreamSocket, target: SimMachine) -> None:
        edge = self.edge(target, sock.machine)
        if not edge.loses():
            self.world.at(self.world.now + edge.trip_s(), sock.established)

    def _simultaneous(self, target: SimMachine, seen: Address, address: Address) -> StreamSocket | None:
        """A socket there that is connecting to where this SYN comes from: its NAT lets the SYN in."""
        for other in target.connecting:
            if other.peer is None and other.remote == seen and self.seen(target, other.local[1], seen) == address:
                return other
        return None

    # --- UDP

    def datagram(self, source: SimMachine, port: int, data: bytes, remote: Address) -> None:
        target = self.find(source, remote[0])
        if target is None or target is source:
            return
        if source.nat != "open":
            source.udp_holes[port, remote] = self.world.now
        edge = self.edge(source, target)
        if edge.udp_cuts or edge.loses():
            return
        seen = self.seen(source, port, remote)
        copies = 2 if edge.duplicate and edge.generator.random() < edge.duplicate else 1
        for _ in range(copies):
            self.world.at(self.world.now + edge.trip_s(), self._datagram_arrives, target, data, seen, remote)

    def _datagram_arrives(self, target: SimMachine, data: bytes, seen: Address, address: Address) -> None:
        if target.off:
            return
        endpoint = self._endpoint_at(target, address, seen)
        if endpoint is not None:
            endpoint.arrive(data, seen)

    def _endpoint_at(self, target: SimMachine, address: Address, seen: Address) -> DatagramTransport | None:
        """Its UDP socket behind that address, for somebody who is seen like that."""
        if address[0] == target.ip:
            return target.udp_endpoints.get(address[1])
        if address == target.mapped_udp:
            return target.udp_endpoints.get(LISTENING_UDP)
        for port, endpoint in target.udp_endpoints.items():
            opened_at = target.udp_holes.get((port, seen))
            if opened_at is not None and self.world.now - opened_at <= UDP_HOLE_S:
                if self.seen(target, port, seen) == address:
                    return endpoint
        return None
