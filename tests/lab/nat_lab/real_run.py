"""A request to real stage processes behind the routers of a cell: the tiny model answers, and the oracle judges."""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from ppsmoke import models
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.keys import derive
from ppsmoke.package import code_hash
from tests.lab.expected import expected as oracle
from tests.lab.nat_lab.expected import HOME, NODES
from tests.lab.nat_lab.lab import PIPE, NatLab
from tests.lab.nat_lab.meeting import FAILURE_BUDGET_S, ROLES, public_place
from tests.lab.nat_lab.process import NodeProcess
from tests.lab.nat_lab.puppet import AgentFailed, Puppet
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT
from tests.lab.paths import TINY_F32
from tests.lab.stage_nodes import stage_environment

STAGES = NODES[1:]
LISTEN = f"0.0.0.0:{TCP_PORT},0.0.0.0:{UDP_PORT}"
MAX_TOKENS = 8
START_BUDGET_S = 30.0
READY_BUDGET_S = 120.0  # a first stage on this machine compiles its kernels
ASK_BUDGET_S = 60.0
END_S = 15.0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """verdict: "right" (the oracle's tokens), "wrong", or "failed"; detail says why. seconds: from the stages' first
    line to the answer or the failure."""

    verdict: str
    detail: str
    seconds: float


def real_run(lab: NatLab, *, python: str = sys.executable) -> RunResult:
    """Two stage processes of `python -m ppsmoke node`, an orchestrating agent at home, one request."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppsmoke-lab-")))
        run_key = secrets.token_bytes(32)
        home = Puppet(lab.node(HOME))
        stack.callback(home.end)
        stages = []
        for name in STAGES:
            environment = _environment(lab, name, run_key, folder)
            command = [python, "-m", "ppsmoke", "node"]
            process = lab.node(name).popen(command, env=environment, stdin=PIPE)
            stack.callback(_end, process)
            stages.append(process)
        _listen(lab, home, run_key)
        for process in stages:
            _first_line(process)
        began = time.monotonic()
        try:
            verdict, detail = _ask(lab, home, run_key)
        except AgentFailed as failure:
            verdict, detail = "failed", f"{failure} {failure.hint}".strip()
        return RunResult(verdict=verdict, detail=detail, seconds=time.monotonic() - began)


def _listen(lab: NatLab, home: Puppet, run_key: bytes) -> None:
    host = lab.host(HOME)
    mapped = [("mapped", host.public, host.mapped_tcp, host.mapped_udp)] if host.mapped_tcp else []
    home.ask(
        "listen",
        run_key=run_key.hex(),
        role=ROLES[HOME],
        num_stages=len(STAGES),
        code_hash=code_hash(),
        model=models.fingerprint(str(TINY_F32)),
        tcp=("0.0.0.0", TCP_PORT),
        udp=("0.0.0.0", UDP_PORT),
        advertise=mapped,
    ).result(START_BUDGET_S)


def _ask(lab: NatLab, home: Puppet, run_key: bytes) -> tuple[str, str]:
    endpoints = []
    for name in STAGES:
        if (where := public_place(lab.host(name))) is not None:
            node_id = RunAuthority(run_key).mint(ROLES[name]).node_id
            place = dict(zip(("host", "tcp_port", "udp_port"), where, strict=True))
            endpoints.append({"role": ROLES[name], "generation": 0, "node_id": node_id, **place})
    gathered = home.ask("gather", endpoints=endpoints, size=len(NODES), within_s=FAILURE_BUDGET_S)
    gathered.result(FAILURE_BUDGET_S + 5.0)
    ready = home.ask("await_ready", stages=len(STAGES), within_s=READY_BUDGET_S)
    ready.result(READY_BUDGET_S + 5.0)
    entry = oracle(TINY_F32.name, "hello", "raw")
    asked = home.ask("ask", prompt="the quick brown fox", raw=True, max_tokens=MAX_TOKENS, within_s=ASK_BUDGET_S)
    answer = asked.result(ASK_BUDGET_S + 5.0)
    if "failed" in answer:
        return "failed", answer["failed"]
    wanted = entry["steps"]["ids"][:MAX_TOKENS]
    if answer["token_ids"] != wanted:
        return "wrong", f"{answer['token_ids']}, not {wanted}"
    return "right", answer["text"]


def _environment(lab: NatLab, name: str, run_key: bytes, folder: Path) -> dict[str, str]:
    """As a rented container would have it: the provider's variables say which of its ports are mapped, and to what."""
    authority = RunAuthority(run_key)
    environment = stage_environment(authority, folder, STAGES.index(name), len(STAGES))
    del environment["PPSMOKE_NODE_WORKER"]  # the real one
    seed, home = authority.mint(ROLES[HOME]).node_id, public_place(lab.host(HOME))
    host = lab.host(name)
    if host.mapped_tcp is not None:
        environment[f"VAST_TCP_PORT_{TCP_PORT}"] = str(host.mapped_tcp)
        environment[f"VAST_UDP_PORT_{UDP_PORT}"] = str(host.mapped_udp)
        environment["PUBLIC_IPADDR"] = host.public
    # Whom nobody can dial has to know somebody who can be: where the others are, if they are anywhere.
    others = {other: public_place(lab.host(other)) for other in STAGES if other != name}
    peers = [
        f"{authority.mint(ROLES[other]).node_id}@{where[0]}:{where[1]}" for other, where in others.items() if where
    ]
    kept = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "LANG", "VIRTUAL_ENV", "CACHEDB", "CC")
    return {
        **{variable: os.environ[variable] for variable in kept if variable in os.environ},
        **environment,
        "MODEL": str(TINY_F32),
        "SEED_ADDR": f"{seed}@{home[0]}:{home[1]}" if home else seed,
        "PPSMOKE_NODE_CLUSTER_KEY": derive(run_key, "cluster").hex(),
        "PPSMOKE_NODE_PEERS": " ".join(peers),
        "PPSMOKE_NODE_LISTEN": LISTEN,
        "PPSMOKE_NODE_LIFETIME_S": str(int(START_BUDGET_S + READY_BUDGET_S + ASK_BUDGET_S)),
        "PPSMOKE_NODE_WIRE_DTYPE": "float32",
        "PPSMOKE_NODE_DEVICE": "CPU",
    }


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
