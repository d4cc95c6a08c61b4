"""A cell of the table, played with real nodes: three agents listen, are introduced, and try to reach each other."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from tests.lab.nat_lab.expected import HOME, LETTERS, NODES, PAIRS, Cell, Expected, Pair, expected
from tests.lab.nat_lab.lab import NatLab
from tests.lab.nat_lab.puppet import AgentFailed, Puppet, settled
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Host

FAILURE_BUDGET_S = 20.0  # the issue's: by then a cell that cannot work has said so
ROUNDING_S = 0.5  # from home's deadline to its answer in our hands
UPGRADE_BUDGET_S = 32.0  # the last of three rounds of punching begins 20 s after the first, and may take 6
STEADY_S = 1.0  # the path that a pair ended on is still its path this much later
LOOK_EVERY_S = 0.1
ROLES = {HOME: "orchestrator", "stage-0": "stage-0-of-2", "stage-1": "stage-1-of-2"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a cell. Times count from when all three nodes listened; None: it did not happen.

    first_s: when the later of a pair's two first messages came; path_s: since when it has been on its last path.
    """

    cell: Cell
    expected: Expected
    paths: dict[Pair, str]
    first_s: dict[Pair, float | None]
    path_s: dict[Pair, float | None]
    message: str  # home's, when it did not gather
    failed_after_s: float | None
    stderr: dict[str, list[str]]

    @property
    def word(self) -> str:
        letters = {path: letter for letter, path in LETTERS.items()} | {"disputed": "?"}
        return "".join(letters[self.paths[pair]] for pair in PAIRS)

    def complaints(self) -> list[str]:
        """What is not as it must be; empty for a cell that did what it had to."""
        found = []
        if self.word != self.expected.word:
            found.append(f"paths {self.word}, not {self.expected.word}")
        if self.expected.works:
            found += [self.message] if self.message else []
            found += [f"no message between {' and '.join(pair)}" for pair in PAIRS if self.first_s[pair] is None]
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
        self._expected = expected(cell)
        self._ids: dict[str, str] = {}
        self._began = 0.0

    def run(self) -> Outcome:
        self._listen()
        gathered, ended = self._introduce(), []
        gathered.add_done_callback(lambda _: ended.append(time.monotonic() - self._began))
        seen = self._until_steady(gathered)
        failure = settled(gathered, FAILURE_BUDGET_S + 5.0)
        failed_after_s = ended[0] if isinstance(failure, AgentFailed) else None
        message = f"{failure} {failure.hint}".strip() if isinstance(failure, AgentFailed) else ""
        return Outcome(
            cell=self._cell,
            expected=self._expected,
            paths={pair: self._path(seen, pair) for pair in PAIRS},
            first_s={pair: self._first_s(seen, pair) for pair in PAIRS},
            path_s={pair: self._path_s(seen, pair) for pair in PAIRS},
            message=message,
            failed_after_s=failed_after_s,
            stderr={name: puppet.stderr for name, puppet in self._puppets.items()},
        )

    def _listen(self) -> None:
        answers = {}
        for name, puppet in self._puppets.items():
            host = self._lab.host(name)
            mapped = [("mapped", host.public, host.mapped_tcp, host.mapped_udp)] if host.mapped_tcp else []
            answers[name] = puppet.ask(
                "listen",
                run_key=self._run_key,
                role=ROLES[name],
                num_stages=2,
                code_hash="c0de" * 10,
                model="30de1" * 8,
                tcp=("0.0.0.0", TCP_PORT),
                udp=("0.0.0.0", UDP_PORT),
                advertise=mapped,
            )
        listening = {name: answer.result(30.0) for name, answer in answers.items()}
        self._ids = {name: said["node_id"] for name, said in listening.items()}
        self._began = max(said["at"] for said in listening.values())

    def _introduce(self) -> Future[Any]:
        """Each is told of the others' public places, where they have one: a provider knows a container's mapped ports
        and a machine's own address, whatever its firewall will say. Then each greets both others. Home's gathering."""
        within_s = UPGRADE_BUDGET_S
        for name, puppet in self._puppets.items():
            others = [other for other in NODES if other != name]
            if name != HOME:
                for endpoint in filter(None, map(self._endpoint, others)):
                    puppet.ask("dial", endpoint=endpoint, within_s=within_s)
            for other in others:
                puppet.ask("greet", peer=self._ids[other], within_s=within_s)
        stages = [endpoint for name in NODES[1:] if (endpoint := self._endpoint(name))]
        return self._puppets[HOME].ask("gather", endpoints=stages, size=3, within_s=FAILURE_BUDGET_S)

    def _endpoint(self, name: str) -> dict[str, Any] | None:
        where = public_place(self._lab.host(name))
        if where is None:
            return None
        host, tcp_port, udp_port = where
        who = {"role": ROLES[name], "generation": 0, "node_id": self._ids[name]}
        return {**who, "host": host, "tcp_port": tcp_port, "udp_port": udp_port}

    def _until_steady(self, gathered: Future[Any]) -> dict[str, dict[str, Any]]:
        """What all have seen, once every pair is on its expected path and has stayed there, or time is up."""
        steady_since: float | None = None
        while True:
            seen = {name: puppet.ask("seen").result(10.0) for name, puppet in self._puppets.items()}
            now = time.monotonic()
            as_expected = all(self._path(seen, pair) == self._expected.paths[pair] for pair in PAIRS)
            greeted = all(
                self._first_s(seen, pair) is not None or self._expected.paths[pair] == "impossible" for pair in PAIRS
            )
            done = as_expected and greeted and (gathered.done() or self._expected.works)
            steady_since = (steady_since or now) if done else None
            if steady_since is not None and now - steady_since >= STEADY_S:
                return seen
            if now - self._began > UPGRADE_BUDGET_S:
                return seen
            time.sleep(LOOK_EVERY_S)

    def _path(self, seen: dict[str, dict[str, Any]], pair: Pair) -> str:
        """The path that both ends name; "disputed" if they differ."""
        one, other = (self._history(seen, *ends)[-1][1] for ends in (pair, pair[::-1]))
        return (one or "impossible") if one == other else "disputed"

    def _path_s(self, seen: dict[str, dict[str, Any]], pair: Pair) -> float | None:
        """Since when the later of the two ends has been on its last path."""
        if self._path(seen, pair) in ("impossible", "disputed"):
            return None
        return max(self._history(seen, *ends)[-1][0] for ends in (pair, pair[::-1])) - self._began

    def _history(self, seen: dict[str, dict[str, Any]], at: str, peer: str) -> list[tuple[float, str]]:
        return seen[at]["paths"].get(self._ids[peer]) or [(self._began, "")]

    def _first_s(self, seen: dict[str, dict[str, Any]], pair: Pair) -> float | None:
        times = [seen[at]["greeted"].get(self._ids[peer]) for at, peer in (pair, pair[::-1])]
        return None if None in times else max(times) - self._began


def public_place(host: Host) -> tuple[str, int, int] | None:
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
    return {"cell": cell, **words, **by_pair, **more}


TIMES = ("first_s", "path_s")
