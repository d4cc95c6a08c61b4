"""The closed list of what may go wrong in a run, and a plan of it drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.lab.sim.machine import SimMachine
from tests.lab.sim.network import Edge
from tests.lab.sim.room import Room, Seat

FIRST_S, LAST_S = 6.0, 40.0  # faults begin in between
ALL_OVER_S = 50.0  # and have ended by then
SHORT_S = (0.3, 1.0, 3.0, 8.0)
# After these nobody is lost: TCP's pauses have doubled to as long as the outage by its end, but a fresh link is dialled
# beside the one that is silent.
MILD_S = SHORT_S
STIRRED_S = (0.05, -0.02, -0.3)  # before a fault, those who talk do so: it finds messages on their way
RESTART_AGAIN_S = 1.0  # whoever restarts a process that has left waits until it has ended, and looks so often
LONG_S = (14.9, 15.1, 20.0)  # around the moments at which a link counts as silent, or a peer as lost


@dataclass(frozen=True)
class Fault:
    """mild: one after which nobody may be lost, if nothing else is wrong meanwhile."""

    kind: str
    begin: Callable[[Injector, random.Random], float]  # returns how long it lasts
    mild: bool


class Injector:
    """Brings faults upon a room. Every cause of trouble in a run goes through here."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.world = room.world
        self.kinds: list[str] = []
        self.mild = False
        self.last_end_s = 0.0  # when the last fault so far was over

    def plan(self) -> None:
        """Draw and schedule: nothing, a few mild faults one after the other, or several of any kind at once."""
        rng = self.world.random("faults")
        style = rng.choice(("none", "mild", "mild", "wild", "wild", "wild", "wild", "wild"))
        self.mild = style != "wild"
        if style == "mild":
            for at_s in (FIRST_S, LAST_S)[: rng.choice((1, 2))]:
                self._schedule(at_s + rng.random(), rng.choice([fault for fault in FAULTS if fault.mild]), rng)
        elif style == "wild":
            for _ in range(rng.randint(1, 6)):
                self._schedule(rng.uniform(FIRST_S, LAST_S), rng.choice(FAULTS), rng)

    def _schedule(self, at_s: float, fault: Fault, rng: random.Random) -> None:
        own = random.Random(rng.random())
        self.world.at(at_s, lambda: self._begin(fault, own))
        for before_s in STIRRED_S:
            self.world.at(at_s - before_s, self.room.stir.notify)

    def _begin(self, fault: Fault, rng: random.Random) -> None:
        self.kinds.append(fault.kind)
        self.world.note("FAULT", fault.kind)
        lasts_s = min(fault.begin(self, rng), ALL_OVER_S - self.world.now)
        self.last_end_s = max(self.last_end_s, self.world.now + lasts_s)

    def lasting(self, rng: random.Random) -> float:
        """How long an outage lasts; in a mild run none that a grace would not outlast."""
        lasts_s = rng.choice(MILD_S if self.mild else SHORT_S + LONG_S) + rng.random() * 0.2
        return min(lasts_s, ALL_OVER_S - self.world.now)

    def until(self, lasts_s: float, undo: Callable[[], None]) -> float:
        self.world.at(self.world.now + lasts_s, undo)
        return lasts_s

    def two(self, rng: random.Random) -> tuple[SimMachine, SimMachine]:
        one, other = rng.sample(self.room.seats, 2)
        self.world.note("between", f"{one.machine.name} {other.machine.name}")
        return one.machine, other.machine

    def one(self, rng: random.Random) -> Seat:
        seat = rng.choice(self.room.seats)
        self.world.note("on", f"{seat!r}")
        return seat

    def edges_of(self, machine: SimMachine) -> list[Edge]:
        network = self.room.network
        others = [other for other in network.machines if other is not machine]
        return [network.edge(*pair) for other in others for pair in ((machine, other), (other, machine))]

    def bend(self, edges: Iterable[Edge], lasts_s: float, **changes: float) -> float:
        """Add to the edges' fields for a while."""
        edges = list(edges)

        def change(sign: int) -> None:
            for edge in edges:
                for name, amount in changes.items():
                    setattr(edge, name, getattr(edge, name) + sign * amount)

        change(1)
        return self.until(lasts_s, lambda: change(-1))

    def restart_later(self, seat: Seat, after_s: float, rng: random.Random, *, told: bool = False) -> float:
        """told: the others are told to dial it again."""
        if rng.random() < 0.2:
            seat.machine.wall_offset_ms -= rng.choice((3_000, 60_000, 3_600_000))
        machine = seat.machine

        def restart() -> None:
            if seat.is_leaving and seat.machine is machine:  # it was put to sleep in the middle of that
                self.world.at(self.world.now + RESTART_AGAIN_S, restart)
                self.last_end_s = max(self.last_end_s, self.world.now + RESTART_AGAIN_S)
            elif seat.machine is machine and seat.node is None and not seat.awaits_host:
                seat.boot()
                if told:
                    self.tell_of(seat)

        return self.until(after_s, restart)

    def tell_of(self, seat: Seat) -> None:
        for other in self.room.living():
            if other is not seat and (other.index == 0 or seat.is_dialable):
                other.machine.loop.call_soon(other.hear_of, seat)


def _cut(on: Injector, rng: random.Random) -> float:
    one, other = on.two(rng)
    network = on.room.network
    return on.bend([network.edge(one, other), network.edge(other, one)], on.lasting(rng), cuts=1)


def _one_way(on: Injector, rng: random.Random) -> float:
    return on.bend([on.room.network.edge(*on.two(rng))], on.lasting(rng), cuts=1)


def _isolated(on: Injector, rng: random.Random) -> float:
    return on.bend(on.edges_of(on.one(rng).machine), on.lasting(rng), cuts=1)


def _udp_blocked(on: Injector, rng: random.Random) -> float:
    machines = on.two(rng) if rng.random() < 0.5 else (on.one(rng).machine,)
    lasts_s = rng.uniform(5, ALL_OVER_S - on.world.now)
    if len(machines) == 1:
        return on.bend(on.edges_of(machines[0]), lasts_s, udp_cuts=1)
    network = on.room.network
    return on.bend([network.edge(*machines), network.edge(*machines[::-1])], lasts_s, udp_cuts=1)


def _lossy(on: Injector, rng: random.Random) -> float:
    machine, lasts_s = on.one(rng).machine, rng.uniform(3, ALL_OVER_S - on.world.now)
    loss = rng.choice((0.02, 0.05) if on.mild else (0.02, 0.05, 0.2, 0.3))
    return on.bend(on.edges_of(machine), lasts_s, loss=loss, duplicate=0.1)


def _slow(on: Injector, rng: random.Random) -> float:
    """Up to half a second each way and more; datagrams overtake each other."""
    lasts_s = rng.uniform(3, ALL_OVER_S - on.world.now)
    return on.bend(on.edges_of(on.one(rng).machine), lasts_s, slower=rng.choice((2.0, 5.0)))


def _frozen(on: Injector, rng: random.Random) -> float:
    seconds = min(rng.uniform(3, 12), ALL_OVER_S - on.world.now)
    on.one(rng).machine.sleep(seconds, clock_stands=False)
    return seconds


def _suspended(on: Injector, rng: random.Random) -> float:
    seconds = min(rng.uniform(3, 30), ALL_OVER_S - on.world.now)
    on.one(rng).machine.sleep(seconds, clock_stands=True)
    return seconds


def _reset(on: Injector, rng: random.Random) -> float:
    """A NAT or firewall between the two starts anew: every connection is answered with RST."""
    one, other = on.two(rng)
    for sock in list(one.sockets):
        if sock.peer is not None and sock.peer.machine is other:
            sock.reset_peer()
            sock.peer.reset_peer()
    return 0.0


def _end(on: Injector, seat: Seat, *, power: bool) -> bool:
    if seat.node is None or seat.machine.is_asleep:
        return False
    seat.gone()
    seat.machine.kill(power=power)
    return True


def _killed(on: Injector, rng: random.Random) -> float:
    seat = on.one(rng)
    return on.restart_later(seat, rng.uniform(0.05, 8), rng) if _end(on, seat, power=False) else 0.0


def _power_lost(on: Injector, rng: random.Random) -> float:
    seat = on.one(rng)
    return on.restart_later(seat, on.lasting(rng), rng) if _end(on, seat, power=True) else 0.0


def _relay_killed(on: Injector, rng: random.Random) -> float:
    """Of those who can be dialled one that relays, if there is any."""
    relays = [seat for seat in on.room.living() if seat.node.relayed()]
    hubs = [seat for seat in on.room.living() if seat.is_dialable]
    if not relays and not hubs:
        return 0.0
    seat = rng.choice(relays or hubs)
    on.world.note("on", f"{seat!r}")
    return on.restart_later(seat, rng.uniform(0.05, 10), rng) if _end(on, seat, power=rng.random() < 0.5) else 0.0


def _left(on: Injector, rng: random.Random) -> float:
    """Its node ends in good order, and starts again: nobody dials it until told."""
    seat = on.one(rng)
    if seat.stopping is None or seat.stopping.done() or seat.machine.is_asleep:
        return 0.0
    seat.stopping.set_result(None)
    return on.restart_later(seat, rng.uniform(6, 9), rng, told=True)


def _replaced(on: Injector, rng: random.Random) -> float:
    """A stage's host is gone for good, and another one takes its place as a new generation."""
    seat = on.room.seats[rng.randrange(1, on.room.size)]
    on.world.note("on", f"{seat!r}")
    if not _end(on, seat, power=True):
        return 0.0
    seat.awaits_host = True

    def arrive() -> None:
        seat.awaits_host = False
        seat.machine = on.room.new_machine(seat.machine.nat, on.room.machines)
        seat.generation += 1
        seat.boot()
        on.tell_of(seat)

    return on.until(rng.uniform(0.5, 8), arrive)


FAULTS = (
    Fault("cut", _cut, mild=True),
    Fault("cut one way", _one_way, mild=True),
    Fault("isolated", _isolated, mild=True),
    Fault("UDP blocked", _udp_blocked, mild=True),
    Fault("lossy", _lossy, mild=True),
    Fault("slow", _slow, mild=True),
    Fault("frozen", _frozen, mild=True),
    Fault("suspended", _suspended, mild=False),
    Fault("reset", _reset, mild=True),
    Fault("killed", _killed, mild=False),
    Fault("power lost", _power_lost, mild=False),
    Fault("relay killed", _relay_killed, mild=False),
    Fault("left", _left, mild=False),
    Fault("replaced", _replaced, mild=False),
)
