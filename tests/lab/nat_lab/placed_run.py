"""A whole run of the product's command in the lab: home asks, the stages sit behind routers of their own.

The orchestrator is home_run.py; each stage is `python -m ppsmoke node` with the environment that the run made for it
and what a provider adds. Its worker is one that does not compute: here it matters who notices what, and when.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Literal

from tests.lab import still_worker
from tests.lab.nat_lab.home_run import SUSPENDED
from tests.lab.nat_lab.lab import PIPE, NatLab
from tests.lab.nat_lab.meeting import public_place
from tests.lab.nat_lab.process import NodeProcess
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Site

HOME, STAGES = "home", ("stage-0", "stage-1")
PROMPT = "hello"
DELAY_MS = 10.0  # of each cable
START_BUDGET_S = 30.0
KEPT = ("PATH", "HOME", "XDG_CACHE_HOME", "LANG", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended. seconds: from the deed (if it was put to sleep: from its waking) to the end of its process."""

    status: int
    seconds: float
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        return next((line for line in self.stderr.splitlines() if line.startswith("ppsmoke: ")), "")

    @property
    def hint(self) -> str:
        return next((line for line in self.stderr.splitlines() if line.startswith("  hint: ")), "")

    @property
    def text_is_right(self) -> bool:
        token_ids = json.loads(self.stdout)["token_ids"]
        return token_ids == still_worker.continuation(still_worker.encode(PROMPT, raw=True), len(token_ids))


@dataclass
class PlacedRun:
    """One run under way. `do` is called in a thread of its own once the run says `at` on its stderr."""

    lab: NatLab
    folder: Path
    at: str
    do: Callable[[PlacedRun], None]
    home: NodeProcess | None = None
    stages: dict[str, NodeProcess] = field(default_factory=dict)
    since: float = 0.0
    _said: list[str] = field(default_factory=list)
    _ids: dict[int, str] = field(default_factory=dict)

    # --- what can be done to it

    def kill(self, stage: str) -> None:
        self.since = time.monotonic()
        self.stages[stage].kill()

    def signal_worker(self, stage: str, number: signal.Signals) -> None:
        """To the worker of a stage."""
        self.since = time.monotonic()
        os.kill(_worker_of(self.stages[stage].pid), number)

    def freeze(self, stage: str) -> None:
        """The node and its worker stand still."""
        self.stages[stage].send_signal(signal.SIGSTOP)
        self.signal_worker(stage, signal.SIGSTOP)

    def suspend(
        self,
        seconds: float,
        *,
        clock: Literal["goes on", "stands"],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Home stands still for so long; what its monotonic clock does meanwhile, and what else happens."""
        self.home.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        meanwhile()
        time.sleep(seconds)
        if clock == "stands":
            (self.folder / "suspended").write_text(f"{time.monotonic() - began:.3f}")
        self.since = time.monotonic()
        self.home.send_signal(signal.SIGCONT)

    # --- its life

    def run(self, arguments: Sequence[str], worker: Mapping[str, str], within_s: float) -> Ended:
        with ExitStack() as stack:
            specs = stack.enter_context(socket.socket(socket.AF_UNIX))
            specs.bind(str(self.folder / "specs"))
            specs.listen(1)
            self._start_home(stack, arguments)
            placing = threading.Thread(target=self._place, args=(specs, worker), daemon=True)
            placing.start()
            stack.callback(placing.join, START_BUDGET_S)
            stack.callback(specs.shutdown, socket.SHUT_RDWR)
            reading = threading.Thread(target=self._read_stderr, daemon=True)
            reading.start()
            stdout: list[bytes] = []
            taking = threading.Thread(target=lambda: stdout.append(_read_all(self.home)), daemon=True)
            taking.start()
            try:
                status = self.home.wait(within_s)
            except TimeoutExpired:
                self.home.kill()
                status = self.home.wait(10)
            ended_at = time.monotonic()
            for thread in (reading, taking):
                thread.join(5)
            seconds = ended_at - (self.since or ended_at)
            return Ended(status=status, seconds=seconds, stdout=b"".join(stdout).decode(), stderr="\n".join(self._said))

    def _start_home(self, stack: ExitStack, arguments: Sequence[str]) -> None:
        asleep = self.folder / "suspended"
        asleep.write_text("0")
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"XDG_STATE_HOME": str(self.folder / "state"), SUSPENDED: str(asleep)}
        command = [sys.executable, "-m", "tests.lab.nat_lab.home_run", str(self.folder / "specs")]
        options = ("--raw", "--prompt", PROMPT, "--json", "-v", "--wire-dtype", "float32")
        self.home = self.lab.node(HOME).popen([*command, *options, *arguments], env=environment, stderr=PIPE)

    def _place(self, specs: socket.socket, worker: Mapping[str, str]) -> None:
        """Start what home asks for, and tell it where that listens; unless the run ends before that."""
        with suppress(OSError), ExitStack() as stack:
            caller = stack.enter_context(specs.accept()[0])
            told = stack.enter_context(caller.makefile("rb"))
            wanted = [json.loads(told.readline()) for _ in STAGES]
            self._ids = {spec["stage"]: spec["node_id"] for spec in wanted}
            for spec in wanted:
                self._start_stage(spec, worker)
            for name in STAGES:
                self.stages[name].stdout.readline()  # it listens
                caller.sendall(json.dumps(self._endpoint(name)).encode() + b"\n")

    def _start_stage(self, spec: dict[str, Any], worker: Mapping[str, str]) -> None:
        name = STAGES[spec["stage"]]
        certs = self.folder / f"certs-{name}.json"
        certs.write_text(spec["certs"])
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | spec["environment"]
        environment |= {"PPSMOKE_NODE_CERTS": str(certs), "PPSMOKE_NODE_LIFELINE": "stdin"}
        environment |= {"PPSMOKE_NODE_LISTEN": f"0.0.0.0:{TCP_PORT},0.0.0.0:{UDP_PORT}"}
        environment |= {"PPSMOKE_NODE_WORKER": still_worker.TARGET, **worker} | self._provided(name)
        with open(self.folder / f"stderr-{name}", "wb") as stderr:
            self.stages[name] = self.lab.node(name).popen(
                [sys.executable, "-m", "ppsmoke", "node"], env=environment, stdin=PIPE, stderr=stderr.fileno()
            )

    def _provided(self, name: str) -> dict[str, str]:
        """A container knows its mapped ports; one that has none, and nobody to come to it, where another can be had."""
        host = self.lab.host(name)
        if host.mapped_tcp is not None:
            ports = {f"VAST_TCP_PORT_{TCP_PORT}": host.mapped_tcp, f"VAST_UDP_PORT_{UDP_PORT}": host.mapped_udp}
            return {"PUBLIC_IPADDR": host.public, **{name: str(port) for name, port in ports.items()}}
        peers = []
        for stage, other in enumerate(STAGES):
            if other != name and (where := public_place(self.lab.host(other))) is not None:
                peers.append(f"{self._ids[stage]}@{where[0]}:{where[1]}")
        return {"PPSMOKE_NODE_PEERS": " ".join(peers)}

    def _endpoint(self, name: str) -> dict[str, Any]:
        stage, where = STAGES.index(name), public_place(self.lab.host(name))
        host, tcp_port, udp_port = where or ("", 0, None)
        who = {"role": f"stage-{stage}-of-{len(STAGES)}", "generation": 0, "node_id": self._ids[stage]}
        return {**who, "host": host, "tcp_port": tcp_port, "udp_port": udp_port}

    def _read_stderr(self) -> None:
        done = False
        for line in _lines(self.home):
            self._said.append(line)
            if not done and self.at in line:
                done = True
                self.since = time.monotonic()
                threading.Thread(target=self.do, args=(self,), daemon=True).start()


def placed_run(
    sites: Sequence[Site],
    *,
    at: str,
    do: Callable[[PlacedRun], None],
    arguments: Sequence[str],
    worker: Mapping[str, str],
    within_s: float,
) -> Ended:
    """A run in a lab of its own, from start to end."""
    with tempfile.TemporaryDirectory(prefix="ppsmoke-placed-") as folder, NatLab(sites) as lab:
        for site in sites:
            lab.edge(site.name).set(delay_ms=DELAY_MS)
        return PlacedRun(lab, Path(folder), at, do).run(arguments, worker, within_s)


def _worker_of(node: int) -> int:
    """The process that a stage node started as its worker."""
    for pid in Path(f"/proc/{node}/task/{node}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise RuntimeError(f"node {node} has no worker")


def _lines(process: NodeProcess) -> Any:
    rest = b""
    while data := process.stderr.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _read_all(process: NodeProcess) -> bytes:
    parts = []
    while data := process.stdout.read(1 << 16):
        parts.append(data)
    return b"".join(parts)
