"""The nodes of a soak: where each stands, and their processes, which can be killed and started again.

Home asks and is behind a NAT; a relay that is nothing else stands in the open; the stages stand behind routers of every
kind, mapped or not, so that links are direct, punched and relayed.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from ppsmoke import models
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.keys import derive
from ppsmoke.package import code_hash
from ppsmoke.pipeline.names import stage_role
from tests.lab.nat_lab.lab import PIPE, NatLab
from tests.lab.nat_lab.meeting import public_place
from tests.lab.nat_lab.process import NodeProcess
from tests.lab.nat_lab.puppet import Puppet
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Site
from tests.lab.paths import TINY_F32
from tests.lab.stage_nodes import MODEL, stage_environment

HOME, RELAY = "home", "relay"
# Of stage after stage; two neighbours in the chain that nobody can dial have to be relayed, or punched.
STANDS = (
    ("nat-preserving", "mapped"),
    ("nat-fully-random", ""),
    ("nat-preserving", ""),
    ("firewall-drop", "mapped"),
    ("nat-preserving", ""),
    ("open", ""),
)
DELAY_MS = 10.0  # one way, of each cable
START_BUDGET_S = 60.0
END_S = 15.0
STILL = {"STILL_DIM": "1024", "STILL_CHUNK": "8", "STILL_CONTEXT": "64"}  # 2 KiB a position


def sites(num_stages: int) -> list[Site]:
    stages = []
    for stage in range(num_stages):
        nat, mapped = STANDS[stage % len(STANDS)]
        host = f"stage-{stage}"
        stages.append(Site(hosts=(host,), nat=nat, mapped=frozenset({host} if mapped else ())))
    return [Site(hosts=(HOME,), nat="nat-preserving"), Site(hosts=(RELAY,), nat="open"), *stages]


class Nodes:
    """All processes of a soak. worker: "still" or "tiny"."""

    def __init__(self, lab: NatLab, folder: Path, *, num_stages: int, worker: str, lifetime_s: float) -> None:
        self.stages = [f"stage-{stage}" for stage in range(num_stages)]
        self.run_key = secrets.token_bytes(32)
        self.model = str(TINY_F32) if worker == "tiny" else MODEL
        self._lab, self._folder, self._worker, self._lifetime_s = lab, folder, worker, lifetime_s
        self._authority = RunAuthority(self.run_key)
        self._running: dict[str, NodeProcess] = {}
        self._log = (folder / "stderr.txt").open("wb", buffering=0)

    def start(self, name: str) -> None:
        """Returns when it listens."""
        if name == RELAY:
            self._start_relay()
            return
        environment = self._environment(name)
        command = [sys.executable, "-m", "ppsmoke", "node"]
        process = self._lab.node(name).popen(command, env=environment, stdin=PIPE, stderr=self._log.fileno())
        self._running[name] = process
        if not select.select([process.stdout], [], [], START_BUDGET_S)[0]:
            raise TimeoutError(f"no first line from {name}; {self.last_words()}")
        line = process.stdout.readline()
        if not line or json.loads(line).get("status") != "listening":
            raise RuntimeError(f"{name} began with {line!r}; {self.last_words()}")

    def start_asker(self, task: dict[str, Any]) -> NodeProcess:
        command = [sys.executable, "-m", "tests.lab.soak.asker", json.dumps(task)]
        process = self._lab.node(HOME).popen(command, stdin=PIPE, stderr=self._log.fileno())
        self._running[HOME] = process
        return process

    def process(self, name: str) -> NodeProcess:
        return self._running[name]

    def kill(self, name: str) -> None:
        process = self._running[name]
        process.kill()
        process.wait(END_S)

    def end(self) -> None:
        for process in self._running.values():
            process.stdin.close()
        for process in self._running.values():
            try:
                process.wait(END_S)
            except TimeoutExpired:
                process.kill()
        self._log.close()

    def last_words(self, count: int = 15) -> str:
        return "\n".join((self._folder / "stderr.txt").read_text(errors="replace").splitlines()[-count:])

    def rss_mb(self, name: str) -> float | None:
        """Of the node's own process; None where it has ended."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self._running[name].pid}/status").read_text().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) / 1024
        return None

    def endpoints(self) -> list[dict[str, Any]]:
        """Of those that can be dialled, for the orchestrator."""
        return [
            {"role": self._role(name), "generation": 0, "node_id": self._id(name)}
            | dict(zip(("host", "tcp_port", "udp_port"), where, strict=True))
            for name in (RELAY, *self.stages)
            if (where := public_place(self._lab.host(name))) is not None
        ]

    def _start_relay(self) -> None:
        relay = Puppet(self._lab.node(RELAY))
        self._running[RELAY] = relay.process
        relay.ask(
            "listen",
            run_key=self.run_key.hex(),
            role=RELAY,
            num_stages=len(self.stages),
            code_hash=code_hash(),
            model=models.fingerprint(self.model),
            tcp=("0.0.0.0", TCP_PORT),
            udp=("0.0.0.0", UDP_PORT),
            advertise=[],
        ).result(START_BUDGET_S)

    def _role(self, name: str) -> str:
        return stage_role(self.stages.index(name), len(self.stages)) if name in self.stages else name

    def _id(self, name: str) -> str:
        return self._authority.mint("orchestrator" if name == HOME else self._role(name)).node_id

    def _environment(self, name: str) -> dict[str, str]:
        """As a rented container would have it: the provider's variables say which of its ports are mapped."""
        environment = stage_environment(self._authority, self._folder, self.stages.index(name), len(self.stages))
        host = self._lab.host(name)
        if host.mapped_tcp is not None:
            environment |= {
                "PUBLIC_IPADDR": host.public,
                f"VAST_TCP_PORT_{TCP_PORT}": str(host.mapped_tcp),
                f"VAST_UDP_PORT_{UDP_PORT}": str(host.mapped_udp),
            }
        if self._worker == "tiny":
            del environment["PPSMOKE_NODE_WORKER"]
            environment |= {"PPSMOKE_NODE_WIRE_DTYPE": "float32", "PPSMOKE_NODE_DEVICE": "CPU"}
        # Whom nobody can dial has to know somebody who can be.
        places = [(self._id(other), public_place(self._lab.host(other))) for other in (RELAY, *self.stages)]
        own = self._id(name)
        peers = [f"{peer}@{where[0]}:{where[1]}" for peer, where in places if where and peer != own]
        kept = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "LANG", "VIRTUAL_ENV", "CACHEDB", "CC")
        return {
            **{variable: os.environ[variable] for variable in kept if variable in os.environ},
            **environment,
            **STILL,
            "MODEL": self.model,
            "SEED_ADDR": self._id(HOME),
            "PPSMOKE_NODE_CLUSTER_KEY": derive(self.run_key, "cluster").hex(),
            "PPSMOKE_NODE_PEERS": " ".join(peers),
            "PPSMOKE_NODE_LISTEN": f"0.0.0.0:{TCP_PORT},0.0.0.0:{UDP_PORT}",
            "PPSMOKE_NODE_LIFETIME_S": str(int(self._lifetime_s)),
        }
