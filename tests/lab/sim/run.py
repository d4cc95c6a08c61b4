"""One run: a room, its faults, its checks, and what came of it."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.lab.sim.checks import RESOLVE_WITHIN_S, Checks
from tests.lab.sim.faults import Injector
from tests.lab.sim.room import Room
from tests.lab.sim.world import Stuck, World

BOOT_S = 3.0  # the machines start within this
ASK_NAMES_S = 100.0
CALM_END_S = 117.0  # then everybody leaves
END_S = 120.0
LOOK_EVERY_S = 1.0


@dataclass
class Outcome:
    seed: int
    violations: list[str]
    trace: int  # equal for equal seeds
    nodes: int
    virtual_s: float
    faults: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    refused: int = 0
    settled_after_s: float = 0.0
    slowest_s: float = 0.0
    cpu_s: float = 0.0


def run(seed: int, *, tell: Callable[[str], None] | None = None) -> Outcome:
    """Everything in it follows from the seed."""
    logging.disable(logging.CRITICAL)  # what the nodes would tell a person
    was_enabled = gc.isenabled()
    gc.disable()  # a destructor that runs at another moment would be another trace
    began_s = time.process_time()
    try:
        outcome = _run(World(seed, tell=tell))
        outcome.cpu_s = time.process_time() - began_s
        return outcome
    finally:
        logging.disable(logging.NOTSET)
        if was_enabled:
            gc.enable()


def _run(world: World) -> Outcome:
    violations: list[str] = []

    def violation(text: str) -> None:
        violations.append(f"{world.now:.3f} s: {text}")
        world.note("VIOLATION", "", detail=text)

    room = Room(world, violation)
    faults = Injector(room)
    checks = Checks(room, faults)
    rng = world.random("boot")
    for seat in room.seats:
        world.at(rng.uniform(0, BOOT_S), seat.boot)
        world.note("seat", seat.machine.name, detail=f"{seat!r} {seat.identity.node_id}")
    faults.plan()
    for second in range(1, round(CALM_END_S)):
        world.at(second * LOOK_EVERY_S, checks.look)
    try:
        world.run(ASK_NAMES_S)
        checks.look_for_half_links()
        for seat in room.living():
            seat.machine.loop.call_soon(seat.ask_names, RESOLVE_WITHIN_S)
        world.run(CALM_END_S)
        checks.check_end()
        for seat in room.living():
            if not seat.stopping.done():
                seat.stopping.set_result(None)
        world.at(END_S + 1, lambda: None)
        world.run(END_S)
        checks.check_left()
    except Stuck as error:
        violation(str(error))
    finally:
        for machine in room.network.machines:
            if machine.running:
                machine.kill(power=True)
        gc.collect()  # a task that has failed says so when it is forgotten
    for machine in room.network.machines:
        for text in machine.errors:
            violation(f"{machine.name}: nobody caught: {text}")
    return Outcome(
        seed=world.seed,
        violations=violations,
        trace=world.trace,
        nodes=room.size,
        virtual_s=world.now,
        faults=Counter(faults.kinds),
        paths=Counter(checks.paths),
        delivered=room.ledger.delivered,
        refused=room.ledger.refused,
        settled_after_s=checks.settled_after_s or 0.0,
        slowest_s=room.ledger.slowest_s,
    )
