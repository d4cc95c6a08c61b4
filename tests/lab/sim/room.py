"""The cluster room of one run: who sits where, behind which NAT, and what each process does: dial, talk, resolve."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ppsmoke.cluster.addresses import Address, Candidate, Endpoint
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.identity import Identity, RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, LinkError, LinkLost
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.cluster import CODE_HASH, MODEL, RUN_KEY, may_own
from tests.lab.sim.ledger import Ledger, Life, encode
from tests.lab.sim.machine import FORWARDED_TCP, FORWARDED_UDP, SimMachine
from tests.lab.sim.network import LISTENING_UDP, Nat, Network
from tests.lab.sim.world import World

TCP, UDP = 7070, LISTENING_UDP
PAUSE_AFTER_LOSS_S = 1.0
SEND_MOST_S = 45.0  # a send has ended by then: with success, or with LinkLost after the grace
SIZES = (40, 200, 900, 4_000, 12_000)  # bytes of a message, each as likely
LARGE, LARGE_SHARE = 100_000, 0.005  # links are kept warm for it with thousands of fillers, so there are few
RARE_S, OFTEN_S = 90.0, 6.0  # between bursts of a pair that hardly talks, and of one that does
CALM_S, CALM_FACTOR = 60.0, 6.0  # after so long everybody talks so much less
BUSY_S, BUSY_EVERY_S = 12.0, 0.2  # until then, while paths are found and improved, the talkative do it so often
GATHER_S = 120.0
GUARD_EVERY_S, GUARD_S = 2.0, 30.0


@functools.cache
def identity(role: str, generation: int) -> Identity:
    return _authority().mint(role, generation)


@functools.cache
def _authority() -> RunAuthority:
    return RunAuthority(RUN_KEY)


class Seat:
    """One role: its machine, which may be replaced, and the process that runs there now."""

    def __init__(self, room: Room, index: int, machine: SimMachine) -> None:
        self.index = index
        self.role = "orchestrator" if index == 0 else f"stage-{index - 1}-of-{room.size - 1}"
        self.generation = 0
        self.machine = machine
        self.awaits_host = False  # its machine is gone for good, and the one that takes its place has not come yet
        self.node: Node | None = None
        self.life: Life | None = None
        self.names_seen: dict[str, str] = {}  # what the names resolved to when the room was asked last
        self.stopping: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Future[None]] = []
        self._news: asyncio.Queue[Endpoint] | None = None  # for a gathering that is going on
        self._room = room

    def __repr__(self) -> str:
        return f"seat {self.index} ({self.role}, {self.machine.nat})"

    @property
    def identity(self) -> Identity:
        return identity(self.role, self.generation)

    @property
    def is_dialable(self) -> bool:
        return self.machine.nat in ("open", "mapped")

    @property
    def is_leaving(self) -> bool:
        return self.stopping is not None and self.stopping.done()

    @property
    def endpoint(self) -> Endpoint:
        """As the orchestrator would know it."""
        ident, machine = self.identity, self.machine
        if machine.nat == "open":
            return Endpoint(self.role, self.generation, ident.node_id, machine.ip, TCP, UDP)
        if machine.nat == "mapped":
            return Endpoint(self.role, self.generation, ident.node_id, machine.public, FORWARDED_TCP, FORWARDED_UDP)
        return Endpoint(self.role, self.generation, ident.node_id, "", 0, None)

    @property
    def names(self) -> list[str]:
        count, stage = self._room.size - 1, self.index - 1
        if stage < 0:
            return []
        return [
            f"pp-stage-{stage}",
            *(["pp-entry"] if stage == 0 else []),
            *(["pp-exit"] if stage == count - 1 else []),
        ]

    def boot(self) -> None:
        self.node = self.life = None
        self.machine.boot(self._main)

    def gone(self) -> None:
        """Its process has ended, or was ended."""
        self.node = self.life = self.stopping = self._news = None

    # --- the process

    async def _main(self) -> None:
        machine, room = self.machine, self._room
        advertise = ()
        if machine.nat == "mapped":
            advertise = (Candidate("mapped", machine.public, FORWARDED_TCP, FORWARDED_UDP),)
        life = None
        try:
            async with Node.listening(
                self.identity,
                cluster_key=room.cluster_key,
                tcp=(machine.ip, TCP),
                udp=(machine.ip, UDP),
                code_hash=CODE_HASH,
                model=MODEL,
                may_own=may_own,
                advertise=advertise,
                machine=machine,
            ) as node:
                life = room.new_life(self, node)
                self.node, self.life = node, life
                self.stopping = stopping = asyncio.get_running_loop().create_future()
                for name in self.names:
                    node.register(name, "box", generation=self.generation)
                self._tasks = [asyncio.ensure_future(self._watched(job, life)) for job in self._jobs(node, life)]
                await stopping
                await cancel_and_reap(*self._tasks)
        finally:
            if self.life is life:
                self.gone()

    def _jobs(self, node: Node, life: Life) -> list[Coroutine[Any, Any, None]]:
        room = self._room
        rng = room.world.random("traffic", life.number)
        jobs = [self._read(node, life)]
        jobs += [self._write(node, life, to, random.Random(rng.random())) for to in room.seats if to is not self]
        if self.index == 0:
            jobs += [self._gather(node), self._guard(node)]
        else:
            hubs = [seat for seat in room.seats if seat.is_dialable and seat is not self]
            jobs += [self._dial(node, hub) for hub in hubs[:1]]
        return jobs

    async def _watched(self, job: Coroutine[Any, Any, None], life: Life) -> None:
        """What a job raises is nothing that a program could have expected."""
        try:
            await job
        except Exception as error:  # whatever it is, the run is told
            if self.life is life:
                self._room.violation(f"{self.role}: {type(error).__name__}: {error}")

    async def _gather(self, node: Node) -> None:
        """As a run begins. It may fail in a storm; the dials go on."""
        self._news = news = asyncio.Queue()
        for seat in self._room.seats[1:]:
            news.put_nowait(seat.endpoint)

        async def known() -> AsyncIterator[Endpoint]:
            while True:
                yield await news.get()

        size = self._room.size
        try:
            await node.gather(known(), size=size, deadline=Deadline.after(GATHER_S), reach_within_s=None)
        except DeadlineExceeded as error:
            self._room.excuse(f"gather: {error}")
        self._news = None

    async def _guard(self, node: Node) -> None:
        """As a run does while it waits for an answer: nobody it has been linked to may be lost."""
        while True:
            await asyncio.sleep(GUARD_EVERY_S)
            linked = [link.peer for link in node.links()]
            try:
                await Deadline.after(GUARD_S).wait(node.guard(linked), doing="guarding")
            except DeadlineExceeded:
                continue
            except LinkLost as error:
                self._room.excuse(f"guard: {error}")

    async def _dial(self, node: Node, hub: Seat) -> None:
        endpoint = hub.endpoint
        try:
            await node.dial(endpoint)
        except LinkError:
            if endpoint.generation == hub.generation:
                raise

    def hear_of(self, replaced: Seat) -> None:
        """Somebody tells this process to dial it from now on, in its newest generation."""
        if self._news is not None:
            self._news.put_nowait(replaced.endpoint)
        if self.node is not None and not self.stopping.done():
            self._tasks.append(asyncio.ensure_future(self._watched(self._dial_again(self.node, replaced), self.life)))

    async def _dial_again(self, node: Node, back: Seat) -> None:
        """Until there has been a link to its newest life: a process that slept hears of that before it has read that
        the old one said goodbye, and then takes the link to the old one for what it was asked for."""
        endpoint = back.endpoint
        while endpoint.generation == back.generation:
            await self._dial(node, back)
            if back.life is None or node._roster.peer(endpoint.node_id).epoch == back.life.epoch:
                return
            await asyncio.sleep(PAUSE_AFTER_LOSS_S)

    async def _read(self, node: Node, life: Life) -> None:
        mailbox, room = node.mailbox("box"), self._room
        while True:
            delivery = await mailbox.receive()
            room.ledger.came(life, delivery.sender, delivery.payload, room.seat_of)

    async def _write(self, node: Node, life: Life, to: Seat, rng: random.Random) -> None:
        room, now = self._room, asyncio.get_running_loop().time
        flow = room.ledger.flow(life, to.index)
        talkative = (self.index, to.index) in room.talkative
        await asyncio.sleep(rng.uniform(0.1, 1.0 if talkative else RARE_S))
        while True:
            for _ in range(rng.choice((1, 1, 2, 5))):
                flow.last += 1
                address, began = Address(to.identity.node_id, "box"), now()
                try:
                    await node.send(
                        address, encode(life, flow.last, LARGE if rng.random() < LARGE_SHARE else rng.choice(SIZES))
                    )
                except LinkLost as error:
                    room.ledger.refused += 1
                    met = node._roster.peer(address.node_id).epoch != 0
                    room.excuse(f"{self.role} to {to.role}: {error}", met=met)
                    await asyncio.sleep(PAUSE_AFTER_LOSS_S)
                else:
                    epoch = node._roster.peer(address.node_id).epoch
                    room.ledger.sent(life, to.index, flow.last, epoch=epoch)
                if now() - began > SEND_MOST_S:
                    room.violation(f"{self.role}: a send to {to.role} took {now() - began:.1f} s")
            pause_s = rng.uniform(0.5, 2) * room.pause_s(talkative)
            if talkative:
                await room.stir.wait(pause_s)  # sooner, if a fault is near
            else:
                await asyncio.sleep(pause_s)

    def ask_names(self, within_s: float) -> None:
        if self.node is not None and not self.stopping.done():
            self._tasks.append(asyncio.ensure_future(self._watched(self._resolve_all(within_s), self.life)))

    async def _resolve_all(self, within_s: float) -> None:
        """What every name of the room leads to, for the checks."""
        self.names_seen.clear()
        for seat in self._room.seats:
            for name in seat.names:
                try:
                    found = await Deadline.after(within_s).wait(self.node.resolve(name), doing=name)
                    self.names_seen[name] = found.node_id
                except DeadlineExceeded:
                    self.names_seen[name] = "nobody"


class Room:
    def __init__(self, world: World, violation: Any) -> None:
        self.world = world
        self.network = Network(world)
        self.cluster_key = derive(RUN_KEY, "cluster")
        self.ledger = Ledger(self.violation, lambda: world.now)
        self.lives: dict[tuple[str, int], Life] = {}
        self.excuses: list[tuple[float, str, bool]] = []  # failures that only a fault excuses; had the two met before
        self._violation = violation
        rng = world.random("room")
        self.size = rng.choice((3, 3, 4, 5))
        nats = _draw_nats(rng, self.size)
        sites = list(range(self.size))
        if rng.random() < 0.2:
            sites[-1] = sites[-2]
        self.machines = 0
        self.seats: list[Seat] = []
        for index in range(self.size):
            self.seats.append(Seat(self, index, self.new_machine(nats[index], sites[index])))
        pairs = [(a, b) for a in range(self.size) for b in range(self.size) if a != b]
        hard = [(a, b) for a, b in pairs if not (self.seats[a].is_dialable or self.seats[b].is_dialable)]
        self.talkative = {rng.choice(hard or pairs), rng.choice(pairs)}
        self.stir = Signal()

    def new_machine(self, nat: Nat, site: int) -> SimMachine:
        self.machines += 1
        return SimMachine(self.network, self.machines - 1, nat=nat, site=site)

    def new_life(self, seat: Seat, node: Node) -> Life:
        life = Life(seat.index, len(self.lives) + 1, node.node_id, node._epoch)
        self.lives[node.node_id, node._epoch] = life
        return life

    def pause_s(self, talkative: bool) -> float:
        """Between two bursts of a pair, about."""
        if talkative and self.world.now < BUSY_S:
            return BUSY_EVERY_S
        return (OFTEN_S if talkative else RARE_S) * (CALM_FACTOR if self.world.now > CALM_S else 1)

    def seat_of(self, node_id: str) -> int:
        for seat in self.seats:
            if node_id in (identity(seat.role, generation).node_id for generation in range(seat.generation + 1)):
                return seat.index
        return -1

    def living(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.node is not None]

    def violation(self, text: str) -> None:
        self._violation(text)

    def excuse(self, text: str, *, met: bool = True) -> None:
        self.excuses.append((self.world.now, text, met))
        self.world.note("lost", "", detail=text)


def _draw_nats(rng: random.Random, size: int) -> list[Nat]:
    """A home, usually behind a NAT, and stages that are often mapped; somebody can be dialled."""
    nats: list[Nat] = [rng.choice(("open", "keeps", "keeps", "random"))]
    nats += [rng.choice(("open", "mapped", "mapped", "keeps", "random")) for _ in range(size - 1)]
    if not {"open", "mapped"} & set(nats):
        index = rng.randrange(size)
        nats[index] = "open" if index == 0 else "mapped"
    return nats
