"""What must hold in every run: while it goes on, once the last fault is over, and after everybody has left."""

from __future__ import annotations

from collections.abc import Iterator

from ppsmoke.cluster.link import Link
from ppsmoke.cluster.swim_state import State
from tests.lab.sim.faults import Injector
from tests.lab.sim.room import Room, Seat

SETTLED_S = 40.0  # after the last fault: everybody sees everybody alive, in its present life
BURIED_S = 60.0  # after the last fault: who is gone is not called alive any more
UPGRADED_S = 66.0  # after the last fault: a path is as good as it can be; rounds of upgrades are 60 s apart
LOST_S = 45.0  # after the last fault: no send fails; silence 15 s, grace 15 s, the pauses between dials
MOST_TASKS = 150  # of one process
MOST_SOCKETS = 60
MOST_BUFFERED_BYTES = 1 << 20  # in one transport
RESOLVE_WITHIN_S = 12.0  # a better owner is waited for 10 s


class Checks:
    """Looks at the room every second."""

    def __init__(self, room: Room, faults: Injector) -> None:
        self._room, self._faults = room, faults
        self._world = room.world
        self.settled_after_s: float | None = None  # since the last fault
        self.paths: list[str] = []  # what the pairs ended on
        self._told: set[str] = set()
        self._half: set[Link] = set()  # links that were not up when it was looked for leaks first

    def look(self) -> None:
        room, now = self._room, self._world.now
        calm_s = now - self._faults.last_end_s
        disagreement = next(self._disagreements(), "")
        if disagreement:
            self.settled_after_s = None
            if calm_s > SETTLED_S and now > self._faults.last_end_s:
                self._once("membership", f"{calm_s:.0f} s after the last fault {disagreement}")
        elif self.settled_after_s is None:
            self.settled_after_s = max(0.0, calm_s)
        for seat in room.living():
            self._check_growth(seat)

    def _once(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._room.violation(text)

    def _disagreements(self) -> Iterator[str]:
        living = self._room.living()
        if len(living) < self._room.size:
            yield f"only {living} live"
        lives = [(seat, seat.node.node_id, seat.node._membership.epoch) for seat in living]
        for seat in living:
            members = seat.node._membership._core.table.members
            for other, node_id, epoch in lives:
                if other is seat:
                    continue
                member = members.get(node_id)
                if member is None or member.state is not State.ALIVE:
                    yield f"{seat} calls {other} {'unknown' if member is None else member.state.name}"
                elif member.epoch != epoch:
                    yield f"{seat} knows {other} in epoch {member.epoch}, it is in {epoch}"

    def _check_growth(self, seat: Seat) -> None:
        loop, machine = seat.machine.loop, seat.machine
        if len(machine.sockets) > MOST_SOCKETS:
            self._once(f"sockets {seat}", f"{seat} has {len(machine.sockets)} sockets")
        buffered = max([transport.most_buffered for transport in machine.transports], default=0)
        if buffered > MOST_BUFFERED_BYTES:
            self._once(f"buffer {seat}", f"{seat} had {buffered:,} bytes in one transport's buffer")
        if (self._world.now % 10) < 1 and len(tasks := loop.tasks()) > MOST_TASKS:
            self._once(f"tasks {seat}", f"{seat} has {len(tasks)} tasks")

    # --- once all is calm

    def look_for_half_links(self) -> None:
        self._half = {link for seat in self._room.living() for link in seat.node._maker.links if link.state != "up"}

    def check_end(self) -> None:
        """At the end of the calm, before anybody leaves."""
        room = self._room
        living = room.living()
        for seat in room.seats:
            if seat.node is None:
                room.violation(f"{seat} has no node")
        room.ledger.check_all_came([seat.life for seat in living], sent_before=self._world.now - 5)
        self._check_excuses()
        for seat in living:
            self._check_names(seat)
            self._check_burials(seat)
            self._check_leaks(seat)
        for index, one in enumerate(living):
            for other in living[index + 1 :]:
                self._check_path(one, other)

    def _check_excuses(self) -> None:
        """A peer may be lost to somebody only while something is wrong, or shortly after; after a mild fault not even
        then, unless the first link of all fell into it."""
        for at_s, text, met in self._room.excuses:
            if (self._faults.mild and met) or not self._faults.kinds:
                self._room.violation(f"at {at_s:.3f} s, with nothing worse than {self._faults.kinds}: {text}")
            elif at_s > self._faults.last_end_s + LOST_S:
                self._room.violation(f"at {at_s:.3f} s, long after the last fault: {text}")

    def _check_names(self, seat: Seat) -> None:
        for owner in self._room.seats:
            for name in owner.names:
                found = seat.names_seen.get(name, "not answered")
                if found != owner.identity.node_id:
                    self._room.violation(f"{seat} resolves {name} to {found}, not to {owner}")

    def _check_burials(self, seat: Seat) -> None:
        current = {other.identity.node_id for other in self._room.seats}
        if self._world.now < self._faults.last_end_s + BURIED_S:
            return
        for member in seat.node.members():
            if member.node_id not in current and member.state in ("alive", "suspect"):
                self._room.violation(f"{seat} calls a node {member.state} that is gone: {member.node_id}")

    def _check_leaks(self, seat: Seat) -> None:
        """Calm means: a link for each linked peer, a socket for each link and leg, and nobody waited for."""
        node, machine = seat.node, seat.machine
        reach = node._reaching
        linked = [peer for peer in node._roster.peers.values() if peer.link is not None]
        links = [link for link in node._maker.links if link.state == "up" or link in self._half]
        if len(links) != len(linked):
            self._room.violation(f"{seat} has {len(links)} links for {len(linked)} linked peers: {links}")
        attempts = len(node._maker.links) - len(links)
        pairs = len(reach.relay._pairs)
        held = sum(len(attempt.held) for attempt in reach.rendezvous._attempts.values())
        expected = len(links) + 2 * pairs + held
        sockets = len(machine.sockets) - len(machine.connecting)
        punching = reach.rendezvous._attempts or reach._puncher._attempts
        if not punching and not attempts and sockets != expected:
            self._room.violation(f"{seat} has {sockets} sockets for {len(links)} links and {pairs} relayed pairs")
        relayed = {
            frozenset((one.node.node_id, peer))
            for one in self._room.living()
            for peer, known in one.node._roster.peers.items()
            if known.link is not None and known.link.via == node.node_id
        }
        if pairs != len(relayed):
            self._room.violation(f"{seat} relays {pairs} pairs where {len(relayed)} use it")

    def _check_path(self, one: Seat, other: Seat) -> None:
        room = self._room
        peers = [a.node._roster.peers.get(b.node.node_id) for a, b in ((one, other), (other, one))]
        if any(peer is None or peer.link is None for peer in peers):
            room.violation(f"{one} and {other} have no link: {peers}")
            return
        links = [peer.link for peer in peers]
        if links[0].id != links[1].id:
            room.violation(f"{one} and {other} do not hold the same link: {links}")
        path, best = links[0].kind.name.lower(), _best_path(one, other)
        self.paths.append(path)
        calm_since = self._faults.last_end_s
        if path == best or self._world.now - calm_since < UPGRADED_S:
            return
        if best == "punched" and path == "relayed":
            started = links[0].up_at + one.machine.loop.slept_s
            banned = any(peer.upgrades._no_punch_until > peer._now() for peer in peers)
            relay = room.seat_of(links[0].via)
            next_to_it = {one.machine.site, other.machine.site} & {room.seats[relay].machine.site}
            if banned or started < calm_since or next_to_it:
                return  # a hole was lost young, three rounds fell into the storm, or the relay sees no NAT between
        room.violation(f"{one} and {other} ended {path}, not {best}: {[peer.upgrades.note for peer in peers]}")

    # --- once everybody has left

    def check_left(self) -> None:
        for machine in self._room.network.machines:
            if machine.running:
                self._room.violation(f"{machine.name} has not ended: {machine.loop.tasks()}")
            for text in machine.left_behind:
                self._room.violation(text)


def _best_path(one: Seat, other: Seat) -> str:
    if one.is_dialable or other.is_dialable or one.machine.site == other.machine.site:
        return "direct"
    return "punched" if one.machine.nat == other.machine.nat == "keeps" else "relayed"
