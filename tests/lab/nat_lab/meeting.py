"""A cell of the table, played with real nodes: three agents listen, are introduced, and try to reach each other."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from tests.lab.nat_lab.expected import HOME, LETTERS, NODES, PAIRS, Cell, Expected, Pair, expected
from tests.lab.nat_lab.lab import NatLab
from tests.lab.nat_lab.puppet import AgentFailed, Answer, Puppet, settled
from tests.lab.nat_lab.sights import UPGRADE_BUDGET_S, Sights, when_steady
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Host

FAILURE_BUDGET_S = 20.0  # the issue's: by then a cell that cannot work has said so
ROUNDING_S = 0.5  # from home's deadline to its answer in our hands
Place = tuple[str, int, int]  # host, TCP port, UDP port
LETTER_OF = {path: letter for letter, path in LETTERS.items()} | {"disputed": "?"}
ROLES = {HOME: "orchestrator", "stage-0": "stage-0-of-2", "stage-1": "stage-1-of-2"}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """verdict: "right" (the oracle's tokens), "wrong", or "failed"; detail says why. seconds: from when all listened
    to the answer or the failure."""

    verdict: str
    detail: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a cell. Times count from when all three nodes listened; None: it did not happen.

    first_s: when the later of a pair's two first messages came; path_s: since when it has been on its last path.
    message: home's, when it did not gather. run: what became of the request, where there was one.
    """

    cell: Cell
    expected: Expected
    paths: dict[Pair, str]
    first_s: dict[Pair, float | None]
    path_s: dict[Pair, float | None]
    message: str
    failed_after_s: float | None
    stderr: dict[str, list[str]]
    run: RunResult | None = None

    @property
    def word(self) -> str:
        return "".join(LETTER_OF[self.paths[pair]] for pair in PAIRS)

    def complaints(self) -> list[str]:
        """What is not as it must be; empty for a cell that did what it had to."""
        found = []
        if self.word != self.expected.word:
            found.append(f"paths {self.word}, not {self.expected.word}")
        if self.expected.works:
            found += [self.message] if self.message else []
            found += [f"no message between {' and '.join(pair)}" for pair in PAIRS if self.first_s[pair] is None]
            if self.run is not None and self.run.verdict != "right":
                found.append(f"run {self.run.verdict}: {self.run.detail}")
        elif self.run is not None and self.run.verdict != "failed":
            found.append(f"run {self.run.verdict}, where no run can be")
        elif self.failed_after_s is None or self.failed_after_s > FAILURE_BUDGET_S + ROUNDING_S:
            found.append(f"no failure within {FAILURE_BUDGET_S:g} s")
        elif not names_a_remedy(self.message):
            found.append(f"its message does not say which side must change what: {self.message!r}")
        return found


def names_a_remedy(message: str) -> bool:
    """Whether a failure's text says what to change (a port), and where: at the stages and at home."""
    text = message.lower()
    stage = "stage" in text
    home = any(word in text for word in ("home", "this machine", "orchestrator", "here", "your"))
    return "port" in text and stage and home


def play(cell: Cell, lab: NatLab) -> Outcome:
    """The cell in a lab that was built for it, which may have delays and faults of its own."""
    with ExitStack() as stack:
        puppets = {}
        for name in NODES:
            puppets[name] = Puppet(lab.node(name))
            stack.callback(puppets[name].end)
        return _Meeting(cell, lab, puppets).run()


class _Meeting:
    def __init__(self, cell: Cell, lab: NatLab, puppets: dict[str, Puppet]) -> None:
        self._cell, self._lab, self._puppets = cell, lab, puppets
        self._run_key = secrets.token_bytes(32).hex()
        self._ids: dict[str, str] = {}

    def run(self) -> Outcome:
        self._listen()
        gathered = self._introduce()
        sights = when_steady(self._look, expected(self._cell), gathered)
        failure = settled(gathered, FAILURE_BUDGET_S + 5.0)
        stderr = {name: puppet.stderr for name, puppet in self._puppets.items()}
        return outcome_of(self._cell, sights, failure, gathered.at, stderr)

    def _listen(self) -> None:
        answers = {name: listen(puppet, self._lab, self._run_key) for name, puppet in self._puppets.items()}
        self._ids = {name: answer.result(30.0)["node_id"] for name, answer in answers.items()}

    def _introduce(self) -> Answer:
        """Each is told where the others can be dialled, and greets both. Home's gathering."""
        for name, puppet in self._puppets.items():
            others = [other for other in NODES if other != name]
            for other in others if name != HOME else ():
                places = told_places(self._lab, name, other)
                endpoints = [endpoint_of(other, self._ids[other], where) for where in places]
                if endpoints:
                    puppet.ask("dial", endpoints=endpoints, within_s=UPGRADE_BUDGET_S)
            for other in others:
                puppet.ask("greet", peer=self._ids[other], within_s=UPGRADE_BUDGET_S)
        return self._puppets[HOME].ask("gather", **gathering(self._lab, self._ids))

    def _look(self) -> Sights:
        asked = {name: puppet.ask("seen") for name, puppet in self._puppets.items()}
        return Sights({name: answer.result(10.0) for name, answer in asked.items()}, self._ids)


def listen(puppet: Puppet, lab: NatLab, run_key: str, **identity: str) -> Answer:
    """The agent as a node that listens where a rented container's does. identity: code_hash and model, if any."""
    host = lab.host(puppet.name)
    return puppet.ask(
        "listen",
        run_key=run_key,
        role=ROLES[puppet.name],
        num_stages=len(NODES) - 1,
        tcp=("0.0.0.0", TCP_PORT),
        udp=("0.0.0.0", UDP_PORT),
        advertise=[("mapped", host.public, host.mapped_tcp, host.mapped_udp)] if host.mapped_tcp else [],
        **({"code_hash": "c0de" * 10, "model": "30de1" * 8} | identity),
    )


def gathering(lab: NatLab, ids: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of home's gathering."""
    places = {name: public_place(lab.host(name)) for name in NODES if name != HOME}
    endpoints = [endpoint_of(name, ids[name], where) for name, where in places.items() if where is not None]
    return {"endpoints": endpoints, "size": len(NODES), "within_s": FAILURE_BUDGET_S}


def endpoint_of(name: str, node_id: str, where: Place) -> dict[str, Any]:
    host, tcp_port, udp_port = where
    who = {"role": ROLES[name], "generation": 0, "node_id": node_id}
    return {**who, "host": host, "tcp_port": tcp_port, "udp_port": udp_port}


def outcome_of(
    cell: Cell,
    sights: Sights,
    ended: Any,
    ended_at: float,
    stderr: dict[str, list[str]],
    run: RunResult | None = None,
) -> Outcome:
    """ended: what came of the gathering, an AgentFailed or anything else; ended_at: when."""
    failed = isinstance(ended, AgentFailed)
    return Outcome(
        cell=cell,
        expected=expected(cell),
        paths=sights.by_pair(sights.path),
        first_s=sights.by_pair(sights.first_s),
        path_s=sights.by_pair(sights.path_s),
        message=f"{ended} {ended.hint}".strip() if failed else "",
        failed_after_s=ended_at - sights.began if failed else None,
        stderr=stderr,
        run=run,
    )


def told_places(lab: NatLab, name: str, other: str) -> list[Place]:
    """Where a stage is told that another node can be dialled. A provider knows a container's mapped ports and a
    machine's own address, whatever its firewall will say. To whom nobody outside could bring word (no port of its own,
    and home not to be dialled) whoever started it tells its neighbour's address on their own network as well."""
    me, them = lab.host(name), lab.host(other)
    cut_off = public_place(me) is None and public_place(lab.host(HOME)) is None
    within = [(them.own, TCP_PORT, UDP_PORT)] if me.site == them.site and cut_off else []
    outside = public_place(them)
    return within + ([outside] if outside is not None else [])


def public_place(host: Host) -> Place | None:
    """Where a host would be dialled from outside, if it has a public address or a mapped port."""
    if host.mapped_tcp is not None:
        return host.public, host.mapped_tcp, host.mapped_udp
    if host.own == host.public:
        return host.public, TCP_PORT, UDP_PORT
    return None


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """For a file: the cell's name, the two words, times by pair, what is wrong."""
    by_pair = {name: {"-".join(pair): value for pair, value in getattr(outcome, name).items()} for name in TIMES}
    cell = {
        name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(outcome.cell).items()
    }
    words = {"expected": outcome.expected.word, "paths": outcome.word}
    more = {"message": outcome.message, "failed_after_s": outcome.failed_after_s, "complaints": outcome.complaints()}
    run = None if outcome.run is None else asdict(outcome.run)
    return {"cell": cell, **words, **by_pair, **more, "run": run}


TIMES = ("first_s", "path_s")
