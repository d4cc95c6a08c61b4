"""A soak as it happens: faults begin and end by the clock, while the asker's lines come in."""

from __future__ import annotations

import heapq
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.lab.nat_lab.cable import Conditions
from tests.lab.nat_lab.lab import NatLab
from tests.lab.nat_lab.process import NodeProcess
from tests.lab.soak.asker import READY_BUDGET_S, REQUEST_BUDGET_S, Outcome, Task
from tests.lab.soak.nodes import DELAY_MS, HOME, RELAY, Nodes
from tests.lab.soak.plan import Fault

READY_AGAIN_S = 60.0  # of a stage that was killed and started again
SETTLE_S = 5.0  # of requests, before memory is measured for the first time
LOOK_EVERY_S = 0.05

Say = Callable[[str], None]


@dataclass
class Happened:
    """A fault as it was: monotonic times; ended_s None while it is on."""

    fault: Fault
    began_s: float
    ended_s: float | None = None


@dataclass
class Record:
    """All that a soak has shown. mb: resident memory by node, first and last, and how often it was started."""

    requests: list[Outcome] = field(default_factory=list)
    faults: list[Happened] = field(default_factory=list)
    mb: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    error: str = ""  # why it could not go on


class Soak:
    def __init__(self, lab: NatLab, nodes: Nodes, *, seed: int, worker: str, say: Say) -> None:
        self.record = Record()
        self._lab, self._nodes, self._say = lab, nodes, say
        self._seed, self._worker = seed, worker
        self._ready: dict[str, int] = dict.fromkeys(nodes.stages, 0)  # lives that have said so
        self._lives: dict[str, int] = {name: 1 for name in self._names()}
        self._first_mb: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asker: NodeProcess
        self._reader = threading.Thread(target=self._read, name="asker", daemon=True)
        self._began_s = 0.0

    def start(self) -> None:
        """Everybody is there, and the first requests have been answered."""
        for name in self._names():
            self._lab.edge(name).set(delay_ms=DELAY_MS)
        for name in (RELAY, *self._nodes.stages):
            self._nodes.start(name)
        nodes = self._nodes
        task = Task(
            run_key=nodes.run_key.hex(),
            num_stages=len(nodes.stages),
            worker=self._worker,
            model=nodes.model,
            endpoints=nodes.endpoints(),
            size=len(self._names()),
            seed=self._seed,
        )
        self._asker = nodes.start_asker(asdict(task))
        self._reader.start()
        self._until(lambda: bool(self.record.requests), READY_BUDGET_S, "the first answer")
        time.sleep(SETTLE_S)
        self._first_mb = {name: self._mb(name) for name in self._names()}

    def play(self, faults: Sequence[Fault], seconds: float) -> None:
        """The faults at their times, from now on."""
        self._began_s = time.monotonic()
        for fault in faults:
            self._at(fault.at_s, lambda fault=fault: self._begin(fault))
        while self._events and not self.record.error:
            when_s, _, act = heapq.heappop(self._events)
            self._sleep_until(when_s)
            act()
        self._sleep_until(seconds)

    def end(self) -> None:
        """No further request; the one at hand is waited for. Memory is measured before anybody ends."""
        for name in self._names():
            self.record.mb[name] = (self._first_mb[name], self._mb(name), self._lives[name])
        self._asker.stdin.close()
        self._reader.join(REQUEST_BUDGET_S + READY_AGAIN_S)

    # --- what comes in

    def _read(self) -> None:
        for line in iter(self._asker.stdout.readline, b""):
            self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        if "ready" in said:
            self._ready[self._nodes.stages[said["ready"]]] += 1
        elif "request" in said:
            outcome = Outcome(**said["request"])
            self.record.requests.append(outcome)
            if outcome.verdict != "right":
                took_s = outcome.ended_s - outcome.asked_s
                self._tell(f"request {outcome.number} {outcome.verdict} after {took_s:.1f} s: {outcome.cause}")
        else:
            self.record.error = said["error"]
            self._tell(f"the asker cannot go on: {said['error']}")

    # --- faults

    def _begin(self, fault: Fault) -> None:
        happened = Happened(fault, time.monotonic())
        self.record.faults.append(happened)
        self._tell(f"{fault}")
        undo = getattr(self, f"_{fault.kind.replace('-', '_')}")(fault)
        self._at(time.monotonic() - self._began_s + fault.lasts_s, lambda: self._finish(happened, undo))

    def _finish(self, happened: Happened, undo: Callable[[], None]) -> None:
        undo()
        if happened.fault.kind == "kill":
            self._await_ready(happened, self._lives[happened.fault.hosts[0]])
        else:
            self._over(happened)

    def _await_ready(self, happened: Happened, life: int) -> None:
        """The fault lasts until the stage is ready again."""
        name, deadline_s = happened.fault.hosts[0], time.monotonic() + READY_AGAIN_S

        def look() -> None:
            if self._ready[name] >= life or self._lives[name] > life:
                self._over(happened)
                self._first_mb[name] = self._mb(name)
            elif time.monotonic() > deadline_s:
                self.record.error = f"{name} was not ready {READY_AGAIN_S:g} s after its restart"
            else:
                self._at(time.monotonic() - self._began_s + LOOK_EVERY_S, look)

        look()

    def _over(self, happened: Happened) -> None:
        happened.ended_s = time.monotonic()
        self._tell(f"over: {happened.fault.kind} {' and '.join(happened.fault.hosts)}")

    def _part(self, fault: Fault) -> Callable[[], None]:
        self._lab.cut(*fault.hosts)
        return lambda: self._lab.heal(*fault.hosts)

    def _unplug(self, fault: Fault) -> Callable[[], None]:
        self._lab.cut(fault.hosts[0])
        return lambda: self._lab.heal(fault.hosts[0])

    def _weather(self, fault: Fault) -> Callable[[], None]:
        edge, usual = self._lab.edge(fault.hosts[0]), asdict(Conditions(delay_ms=DELAY_MS))
        edge.set(**fault.conditions)
        return lambda: edge.set(**{name: usual[name] for name in fault.conditions})

    def _freeze(self, fault: Fault) -> Callable[[], None]:
        process = self._nodes.process(fault.hosts[0])
        process.send_signal(signal.SIGSTOP)
        return lambda: process.send_signal(signal.SIGCONT)

    def _kill(self, fault: Fault) -> Callable[[], None]:
        return self._killed(fault.hosts[0])

    def _relay_down(self, fault: Fault) -> Callable[[], None]:
        return self._killed(RELAY)

    def _killed(self, name: str) -> Callable[[], None]:
        self._nodes.kill(name)

        def start_again() -> None:
            self._lives[name] += 1
            self._nodes.start(name)
            self._first_mb[name] = self._mb(name)

        return start_again

    def _no_udp(self, fault: Fault) -> Callable[[], None]:
        self._lab.rebuild(fault.hosts[0], udp="blocked")
        return lambda: self._lab.rebuild(fault.hosts[0], udp="passes")

    def _router_restart(self, fault: Fault) -> Callable[[], None]:
        self._lab.forget_connections(fault.hosts[0])
        return lambda: None

    # --- help

    def _names(self) -> list[str]:
        return [HOME, RELAY, *self._nodes.stages]

    def _mb(self, name: str) -> float:
        return self._nodes.rss_mb(name) or 0.0

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), act))

    def _sleep_until(self, when_s: float) -> None:
        time.sleep(max(0.0, self._began_s + when_s - time.monotonic()))

    def _until(self, condition: Callable[[], bool], within_s: float, doing: str) -> None:
        until_s = time.monotonic() + within_s
        while not condition():
            if self.record.error or time.monotonic() > until_s or not self._reader.is_alive():
                raise TimeoutError(f"{doing}: {self.record.error or self._nodes.last_words()}")
            time.sleep(LOOK_EVERY_S)

    def _tell(self, text: str) -> None:
        at_s = time.monotonic() - self._began_s if self._began_s else 0.0
        self._say(f"{at_s:6.1f} s  {text}")
