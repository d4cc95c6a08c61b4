"""`python -m ppsmoke --vastai` against a fake of its own: one call makes the service, the containers and the run.

Time runs `scale` times faster for the service and for the client's waits at it; boots, links and answers take the time
they take. Without containers nothing ever boots: for what ends before. With them a stage's worker is one that does not
compute (still_worker), and whose pip has nothing to do, unless a model is given.

What is done to a run happens at a moment that cannot pass before it is done: a call that the fake has not answered yet
(fake.on), a pip or a node that is held at its start (Lab.hold), or a worker at its gate (STILL_FAULT=gate@n).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppsmoke.package import own_command
from tests.lab import still_worker
from tests.lab.fake_vast import FakeVast, Inside
from tests.lab.marked import marked

ROOT = Path(__file__).parents[2]
KEY = f"the-users-own-key-{secrets.token_hex(8)}"  # of this process alone: tests look for it on the whole machine
FAST, WITH_BOOT = 20.0, 4.0  # fake seconds a second
# The client's own limits of what takes real time here; a row that waits for one of them says otherwise.
UNSCALED_S = {"ppsmoke.rent.booting.NOBODY_S": 60.0}
RUN_BUDGET_S = 240.0
SETTLED_WITHIN_S = 60.0
# A run's own time limits in seconds, shortened by a row that waits for one of them.
_MAIN = """
import importlib, json, sys
for name, value in json.loads(sys.argv.pop(1)).items():
    module, _, attribute = name.rpartition(".")
    module = importlib.import_module(module)
    getattr(module, attribute)  # a name that is there no more is a mistake
    setattr(module, attribute, value)
from ppsmoke.cli import main
sys.exit(main())
"""


@dataclass
class Ended:
    """How a run ended, and what the account showed then. undone: the deeds whose words it never said."""

    status: int | None
    seconds: float
    stdout: str
    stderr: str
    ledger: dict[str, Any]
    undone: tuple[str, ...] = ()

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    @property
    def message(self) -> str:
        return next((line for line in self.stderr.splitlines() if line.startswith("ppsmoke: ")), "")


@dataclass(frozen=True)
class Deed:
    """What is done to a run when it says these words."""

    at: str
    do: Callable[[Lab, subprocess.Popen[str]], None]


@dataclass
class Lab:
    """The fake, and where the runs against it keep their state."""

    fake: FakeVast
    scale: float
    home: Path
    epoch: float
    model: str = "smollm2:135m"
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def gate(self) -> Path:
        """Where a still worker's gate is: closed while this file is there."""
        return self.home / "gate"

    def hold(self, name: str, *, stage: int) -> None:
        """Have the "pip" or "node" of the stage's first machine stand still at its start, for good (let_go apart)."""
        held: list[int] = []

        def created(request: Any, instance_id: int | None) -> None:
            if instance_id is not None and not held and stage_of(self.fake.instance(instance_id).label) == stage:
                held.append(instance_id)
                self.fake.hold(instance_id, name)

        self.fake.on("create", "after", created)

    def let_go(self, name: str, *, stage: int) -> None:
        """End a hold."""
        for line in self.fake.ledger()["live"]:
            if stage_of(line["label"]) == stage:
                self.fake.let_go(line["id"], name)

    def give(self, **environment: str) -> None:
        """Have each machine's container find other values than those that it was created with."""

        def created(request: Any, instance_id: int | None) -> None:
            if instance_id is not None:
                body = self.fake.instance(instance_id).body
                assert environment.keys() <= body["env"].keys()
                self.fake.instance(instance_id).body = body | {"env": body["env"] | environment}

        self.fake.on("create", "after", created)

    def env(self, **more: str) -> dict[str, str]:
        """A run's environment; every process of it can be told by its TMPDIR."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PPSMOKE", "VAST"))}
        tmp = self.home / "tmp"
        tmp.mkdir(parents=True, exist_ok=True)
        ours = {"VAST_URL": self.fake.url, "XDG_STATE_HOME": str(self.home / "state"), "TMPDIR": str(tmp)}
        clock = {} if self.scale == 1.0 else {"PPSMOKE_LAB_CLOCK": f"{self.scale}@{self.epoch}"}
        return inherited | own_command()[1] | ours | clock | self.environment | more

    def start(
        self, *arguments: str, patch: Mapping[str, Any] | None = None, key: str | None = KEY, **popen: Any
    ) -> subprocess.Popen[str]:
        """A run, or another command of ours, begun; its key comes in VAST_API_KEY."""
        unscaled = {name: seconds * self.scale for name, seconds in UNSCALED_S.items()}
        code = [self.python, "-c", _MAIN, json.dumps({**unscaled, **(patch or {})})]
        env = self.env(**({} if key is None else {"VAST_API_KEY": key}))
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [*code, *arguments], env=env, text=True, cwd=self.home, start_new_session=True, **(streams | popen)
        )

    def run(
        self, *arguments: str, patch: Mapping[str, Any] | None = None, key: str | None = KEY, deeds: Sequence[Deed] = ()
    ) -> Ended:
        """A `--vastai --json` run, from start to end."""
        began = time.monotonic()
        process = self.start("--vastai", "--json", "--model", self.model, *arguments, patch=patch, key=key)
        return self.end_of(process, began, deeds)

    def end_of(self, process: subprocess.Popen[str], began: float, deeds: Sequence[Deed] = ()) -> Ended:
        """Read it to its end, doing each deed at the first line of its stderr that holds the deed's words. Raises what
        a deed raised."""
        said: dict[str, list[str]] = {"stdout": [], "stderr": []}
        left, failed = list(deeds), []

        def read(name: str) -> None:
            for line in getattr(process, name):
                said[name].append(line)
                for deed in [one for one in left if name == "stderr" and one.at in line]:
                    left.remove(deed)
                    try:
                        deed.do(self, process)
                    except Exception as error:  # the run has to be read to its end all the same
                        failed.append(error)

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in said]
        for reader in readers:
            reader.start()
        try:
            process.wait(RUN_BUDGET_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join(5)
        stdout, stderr = ("".join(lines) for lines in said.values())
        if failed:
            raise failed[0]
        undone = tuple(deed.at for deed in left)
        return Ended(process.returncode, time.monotonic() - began, stdout, stderr, self.fake.ledger(), undone)

    def command(self, *arguments: str) -> Ended:
        """`reap` or `ls`."""
        began = time.monotonic()
        return self.end_of(self.start(*arguments), began)

    def settled(self, within_s: float = SETTLED_WITHIN_S) -> float | None:
        """Seconds until nothing of ours is live, None if that does not come."""
        began = time.monotonic()
        while self.fake.ledger()["live"]:
            if time.monotonic() - began > within_s:
                return None
            time.sleep(0.05)
        return time.monotonic() - began


@contextmanager
def rented(
    home: Path,
    *,
    boots: bool,
    scale: float | None = None,
    worker: Mapping[str, str] | None = None,
    model: str = "",
    inside: Mapping[str, Any] | None = None,
    **fake: Any,
) -> Iterator[Lab]:
    """boots: containers really run; worker: the still worker's settings; model: compute this one instead."""
    scale = scale or (WITH_BOOT if boots else FAST)
    containers = None
    if boots:
        still = {} if model else {"PPSMOKE_NODE_WORKER": still_worker.TARGET, "PYTHONPATH": str(ROOT)}
        still |= {"STILL_GATE": str(home / "gate")}
        idle = {} if model else {"pip": "idle"}
        containers = Inside(**{**idle, "env": {**still, **(worker or {})}, **(inside or {})})
    epoch = time.time()
    options = {"key": KEY, "start": epoch, "enforce_limits": True, **fake}
    with FakeVast(scale=scale, inside=containers, folder=home / "containers", **options) as service:
        lab = Lab(service, scale, home, epoch, model=model or "smollm2:135m")
        home.mkdir(parents=True, exist_ok=True)
        lab.gate.touch()
        try:
            yield lab
        finally:
            for process in marked(str(home / "tmp")):  # a reaper that still tries to reach this fake
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def stage_of(label: str | None) -> int:
    """Of an instance of ours: ppsmoke-<run>-<stage>-..."""
    return int((label or "").split("-")[2])


def nodes_of(lab: Lab, instance_id: int) -> list[int]:
    """The container's processes that run our code as a node."""
    found = []
    for pid in lab.fake.pids(instance_id):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b".pyz\0node\0"):
                found.append(pid)
    return found
