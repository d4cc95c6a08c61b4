"""A request to real stage processes behind the routers of a cell: the tiny model answers, and the oracle judges."""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from ppsmoke import models
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.keys import derive
from ppsmoke.package import code_hash
from tests.lab.expected import expected as oracle
from tests.lab.nat_lab.expected import HOME, NODES, Cell, expected
from tests.lab.nat_lab.lab import PIPE, NatLab
from tests.lab.nat_lab.meeting import (
    ROLES,
    Outcome,
    RunResult,
    gathering,
    listen,
    outcome_of,
    public_place,
    told_places,
)
from tests.lab.nat_lab.process import NodeProcess
from tests.lab.nat_lab.puppet import AgentFailed, Answer, Puppet, settled
from tests.lab.nat_lab.sights import Sights, when_steady
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT
from tests.lab.nat_lab.warm_workers import WarmWorkers
from tests.lab.paths import TINY_F32
from tests.lab.stage_nodes import stage_environment

STAGES = NODES[1:]
LISTEN = f"0.0.0.0:{TCP_PORT},0.0.0.0:{UDP_PORT}"
MAX_TOKENS = 8
START_BUDGET_S = 30.0
READY_BUDGET_S = 30.0  # from when all have gathered: the workers are warm
ASK_BUDGET_S = 60.0
END_S = 15.0


def warm_workers() -> WarmWorkers:
    """Both stages of the tiny model."""
    return WarmWorkers(TINY_F32, num_stages=len(STAGES))


def run_for_real(cell: Cell, lab: NatLab, workers: WarmWorkers) -> Outcome:
    """Two stage nodes as `python -m ppsmoke node` starts them, an orchestrating agent at home, one request; in a lab
    that was built for the cell."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppsmoke-lab-")))
        return _RealRun(cell, lab, workers, folder, stack).outcome()


class _RealRun:
    def __init__(self, cell: Cell, lab: NatLab, workers: WarmWorkers, folder: Path, stack: ExitStack) -> None:
        self._cell, self._lab, self._folder = cell, lab, folder
        self._run_key = secrets.token_bytes(32)
        authority = RunAuthority(self._run_key)
        self._ids = {name: authority.mint(role).node_id for name, role in ROLES.items()}
        self._home = Puppet(lab.node(HOME))
        stack.callback(self._home.end)
        self._stages = [self._start(stack, name, authority, workers) for name in STAGES]

    def outcome(self) -> Outcome:
        identity = {"code_hash": code_hash(), "model": models.fingerprint(str(TINY_F32))}
        listen(self._home, self._lab, self._run_key.hex(), **identity).result(START_BUDGET_S)
        for process in self._stages:
            _first_line(process)
        for name in STAGES:
            self._home.ask("greet", peer=self._ids[name], within_s=ASK_BUDGET_S)
        answered = self._infer()
        sights = when_steady(self._look, expected(self._cell), answered)
        ended = settled(answered, ASK_BUDGET_S)
        verdict, detail = _judge(ended)
        result = RunResult(verdict=verdict, detail=detail, seconds=answered.at - sights.began)
        return outcome_of(self._cell, sights, ended, answered.at, self._stderr(), result)

    def _infer(self) -> Answer:
        prompt = {"prompt": "the quick brown fox", "raw": True, "max_tokens": MAX_TOKENS, "within_s": ASK_BUDGET_S}
        ready = {"stages": len(STAGES), "within_s": READY_BUDGET_S}
        return self._home.ask("infer", gather=gathering(self._lab, self._ids), await_ready=ready, ask=prompt)

    def _look(self) -> Sights:
        home = self._home.ask("seen").result(10.0)
        stages = {name: json.loads(self._seen_file(name).read_text()) for name in STAGES}
        return Sights({HOME: home, **stages}, self._ids)

    def _stderr(self) -> dict[str, list[str]]:
        stages = {name: self._stderr_file(name).read_text(errors="replace").splitlines() for name in STAGES}
        return {HOME: self._home.stderr, **stages}

    def _seen_file(self, name: str) -> Path:
        return self._folder / f"seen-{name}.json"

    def _stderr_file(self, name: str) -> Path:
        return self._folder / f"stderr-{name}"

    def _start(self, stack: ExitStack, name: str, authority: RunAuthority, workers: WarmWorkers) -> NodeProcess:
        others = [self._ids[other] for other in NODES if other != name]
        command = [sys.executable, "-m", "tests.lab.nat_lab.watched_stage", str(self._seen_file(name)), *others]
        environment = self._environment(name, authority) | workers.environment(STAGES.index(name))
        with open(self._stderr_file(name), "wb") as stderr:
            process = self._lab.node(name).popen(command, env=environment, stdin=PIPE, stderr=stderr.fileno())
        stack.callback(_end, process)
        return process

    def _environment(self, name: str, authority: RunAuthority) -> dict[str, str]:
        """As a rented container would have it: the provider's variables say which of its ports are mapped, and to
        what. Whom nobody can dial has to know somebody who can be."""
        environment = stage_environment(authority, self._folder, STAGES.index(name), len(STAGES))
        host, home = self._lab.host(name), public_place(self._lab.host(HOME))
        if host.mapped_tcp is not None:
            environment[f"VAST_TCP_PORT_{TCP_PORT}"] = str(host.mapped_tcp)
            environment[f"VAST_UDP_PORT_{UDP_PORT}"] = str(host.mapped_udp)
            environment["PUBLIC_IPADDR"] = host.public
        peers = []
        for other in STAGES:
            if other != name and (places := told_places(self._lab, name, other)):
                peers.append(f"{self._ids[other]}@{','.join(f'{place[0]}:{place[1]}' for place in places)}")
        kept = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "LANG", "VIRTUAL_ENV")
        return {
            **{variable: os.environ[variable] for variable in kept if variable in os.environ},
            **environment,
            "MODEL": str(TINY_F32),
            "SEED_ADDR": f"{self._ids[HOME]}@{home[0]}:{home[1]}" if home else self._ids[HOME],
            "PPSMOKE_NODE_CLUSTER_KEY": derive(self._run_key, "cluster").hex(),
            "PPSMOKE_NODE_PEERS": " ".join(peers),
            "PPSMOKE_NODE_LISTEN": LISTEN,
            "PPSMOKE_NODE_LIFETIME_S": str(int(START_BUDGET_S + READY_BUDGET_S + ASK_BUDGET_S)),
            "PPSMOKE_NODE_WIRE_DTYPE": "float32",
            "PPSMOKE_NODE_DEVICE": "CPU",
        }


def _judge(ended: Any) -> tuple[str, str]:
    """Verdict and detail of a RunResult."""
    if isinstance(ended, AgentFailed):
        return "failed", f"{ended} {ended.hint}".strip()
    if "failed" in ended:
        return "failed", ended["failed"]
    wanted = oracle(TINY_F32.name, "hello", "raw")["steps"]["ids"][:MAX_TOKENS]
    if ended["token_ids"] != wanted:
        return "wrong", f"{ended['token_ids']}, not {wanted}"
    return "right", ended["text"]


def _first_line(process: NodeProcess) -> None:
    if not select.select([process.stdout], [], [], START_BUDGET_S)[0]:
        raise TimeoutError(f"no first line from {' '.join(process.args)}")
    line = process.stdout.readline()
    if not line or json.loads(line).get("status") != "listening":
        raise RuntimeError(f"{' '.join(process.args)} began with {line!r}")


def _end(process: NodeProcess) -> None:
    process.stdin.close()
    try:
        process.wait(END_S)
    except TimeoutExpired:
        process.kill()
        process.wait(END_S)
