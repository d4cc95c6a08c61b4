"""A link that is silent: another one is dialled beside it, so that an outage costs little more than its own length.

Rooms of whole nodes in virtual time (tests/lab/sim).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ppsmoke.cluster import roster
from ppsmoke.cluster.dialling import BESIDE_AT_ONCE, Dialler
from ppsmoke.cluster.frames import FrameType, encode_frame
from ppsmoke.cluster.handshake import Bye, ByeReason, Hello, Resume
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.node import Node
from tests.lab.cluster import lab, run, within
from tests.lab.honest import CLUSTER_KEY, identity_on_side
from tests.lab.raw_peer import RawPeer
from tests.lab.sim.machine import SimMachine
from tests.lab.sim.network import Edge
from tests.lab.sim.room import Room
from tests.lab.sim.world import World

STARTED_S = 15.0  # every pair is linked, and has been for longer than a young link
OUTAGE_S = 8.0
FOUND_S = 3.0  # from the network's return to a link that speaks, at most; the old one may need as long as the outage


@contextmanager
def room_of_dialable_nodes(number: int, **changes: float) -> Iterator[tuple[World, Room, list[str]]]:
    """The number-th of those rooms, started, and what was wrong in it so far; changes: of all edges, from the start."""
    violations: list[str] = []
    rooms = (Room(World(seed), violations.append) for seed in itertools.count())
    dialable = (room for room in rooms if all(seat.is_dialable for seat in room.seats))
    room = next(itertools.islice(dialable, number, None))
    for edge in edges(room):
        for name, value in changes.items():
            setattr(edge, name, value)
    for seat in room.seats:
        seat.boot()
    try:
        room.world.run(STARTED_S)
        yield room.world, room, violations
    finally:
        for machine in room.network.machines:
            machine.kill(power=True)


def edges(room: Room, *, of: SimMachine | None = None) -> list[Edge]:
    """All ways from one machine to another, or those from and to this one."""
    pairs = itertools.permutations(room.network.machines, 2)
    return [room.network.edge(*pair) for pair in pairs if of is None or of in pair]


def accepted(room: Room) -> Counter[int]:
    return Counter({seat.index: seat.node.counts["accepted"] for seat in room.seats})


def links(room: Room):
    return [(seat, peer.link) for seat in room.seats for peer in seat.node._roster.peers.values()]


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 6))])
def test_an_outage_of_eight_seconds_costs_nobody_a_peer_nor_a_message(number):
    """Without UDP, all that is heard of a peer comes over its link."""
    with room_of_dialable_nodes(number, udp_cuts=1) as (world, room, violations):
        world.run(STARTED_S + 0.9 * number)  # at another moment since the last pings
        around = edges(room, of=room.seats[1].machine)
        for edge in around:
            edge.cuts += 1
        world.run(world.now + OUTAGE_S)
        for edge in around:
            edge.cuts -= 1
        world.run(world.now + FOUND_S)
        assert {link is not None and world.now - link.last_heard < FOUND_S for _, link in links(room)} == {True}
        world.run(world.now + 20.0)
        assert violations == [] and room.excuses == []
        room.ledger.check_all_came([seat.life for seat in room.seats], sent_before=world.now - 2)
        assert violations == []


def test_a_link_that_is_idle_and_slow_is_not_dialled_beside():
    """Its answer to a ping takes longer than the shortest wait for one."""
    with room_of_dialable_nodes(1, delay_s=1.1) as (world, room, _):
        world.run(world.now + 30.0)  # all pairs have met, and mapped ports have been checked
        before, ids = accepted(room), [link.id for _, link in links(room)]
        world.run(world.now + 60.0)
        assert LinkTiming().answer_s < min(link.rtt_s for _, link in links(room))
        assert accepted(room) == before and [link.id for _, link in links(room)] == ids


@pytest.mark.slow
def test_while_nobody_answers_the_dials_beside_a_silent_link_are_few_and_end_with_it(monkeypatch):
    begun: list[float] = []
    race = Dialler._race

    async def counted(self: Dialler, peer, attempts):
        if peer.link is not None:
            begun.append(self._now())
        await race(self, peer, attempts)

    monkeypatch.setattr(Dialler, "_race", counted)
    with room_of_dialable_nodes(0) as (world, room, _):
        for edge in edges(room):
            edge.cuts += 1
        world.run(world.now + LinkTiming().down_after_s + 1.0)
        assert {link for _, link in links(room)} == {None}
        pairs = room.size * (room.size - 1)
        assert pairs <= len(begun) <= 5 * pairs
        tasks = [task.get_name() for seat in room.seats for task in seat.machine.loop.tasks()]
        assert not [name for name in tasks if name.startswith("beside")]


@pytest.mark.slow
def test_a_frozen_host_whose_kernel_accepts_every_dial_gets_few():
    """Its links are silent too, as in an outage, and connections to it come up; nobody there answers them."""
    with room_of_dialable_nodes(0) as (world, room, _):
        world.run(world.now + 30.0)  # all pairs have met
        frozen = room.seats[1].machine
        peers = len(frozen.sockets)  # a link to each
        frozen.sleep(30.0, clock_stands=True)
        world.run(world.now + 11.0)  # the links have been silent for that long and up to 5 s more, and are up
        assert peers < len(frozen.sockets) <= peers + BESIDE_AT_ONCE * peers


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_silent_link_gives_way_and_one_that_speaks_does_not(side, monkeypatch):
    """Whoever finds it silent tells the other side, which may have heard it a moment ago and still holds it."""
    monkeypatch.setattr(roster, "YOUNG_LINK_S", 0.0)

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = identity_on_side(side, node.node_id)
            first = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            [link] = node._maker.links
            second, hello = await offered_another(node, identity, link)
            assert hello.resume.current_link == link.id
            if side == "client":
                assert Bye.decode((await within(second.expect(FrameType.BYE))).payload).reason is ByeReason.DUPLICATE
            await second.close()
            fall_silent(link)
            second, hello = await offered_another(node, identity, link)
            assert hello.resume.current_link == 0
            if side == "client":
                await within(second.expect(FrameType.READY))
            await second.close()
            await first.close()

    run(scenario())


async def offered_another(node: Node, identity: Identity, link: Link) -> tuple[RawPeer, Hello]:
    """By a peer that says that it holds this one; and what the node says about that."""
    peer = await within(RawPeer.dial(node, identity, CLUSTER_KEY))
    peer.say_hello(identity.node_id, resume=Resume(current_link=link.id))
    hello = Hello.decode((await within(peer.expect(FrameType.HELLO))).payload)
    if not identity.node_id < node.node_id:
        peer.write(encode_frame(FrameType.READY))
    return peer, hello


def fall_silent(link: Link) -> None:
    """As if its last byte had come so long ago when it looks for that."""
    link._timer.cancel()
    link.last_heard -= LinkTiming().ping_after_s + LinkTiming().answer_s
    link._on_timer()
    assert link.silent
