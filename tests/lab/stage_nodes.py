"""Real stage nodes as local processes around still workers, and an orchestrator's node in the test's own process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ppsmoke import models
from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.keys import derive, new_run_key
from ppsmoke.package import code_hash
from ppsmoke.pipeline.messages import InferenceRequest, InferenceResponse, StageFailed, StageStatus, decode, encode
from ppsmoke.pipeline.names import ENTRY_NAME, ORCHESTRATOR_MAILBOX, may_own, stage_role
from ppsmoke.waiting import Deadline
from tests.lab import still_worker
from tests.lab.processes import group_is_empty, until

ROOT = Path(__file__).parents[2]
MODEL = "smollm2:135m"  # its fingerprint alone: still workers load nothing
COMMAND = [sys.executable, "-c", "import sys; from ppsmoke.stage_node import main; sys.exit(main())"]


class StageProcess:
    """One node process, its first line and its stderr. `worker` is the pid that its worker wrote down."""

    def __init__(self, environment: dict[str, str], pids: Path) -> None:
        self._pids = pids
        self.process = subprocess.Popen(
            COMMAND,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._err: list[bytes] = []
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        self.listening: dict[str, Any] = {}

    def _read_stderr(self) -> None:
        self._err += iter(self.process.stderr.readline, b"")

    async def first_line(self) -> dict[str, Any]:
        line = await asyncio.to_thread(self.process.stdout.readline)
        self.listening = json.loads(line) if line else {}
        return self.listening

    @property
    def pids(self) -> list[int]:
        """The worker's pid, then its children's."""
        return [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []

    async def wait(self, within_s: float = 15.0) -> int:
        """Its exit status; its stderr is whole after this."""
        status = await asyncio.to_thread(self.process.wait, within_s)
        await asyncio.to_thread(self._reader.join, 5)
        return status

    @property
    def stderr(self) -> str:
        return b"".join(self._err).decode(errors="replace")

    def end(self) -> None:
        """Whatever has happened: nothing of it stays, and the test fails if something had stayed by itself."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Lab:
    """The orchestrator's node, and its stages."""

    def __init__(self, node: Node, stages: list[StageProcess], node_stack: AsyncExitStack) -> None:
        self.node, self.stages = node, stages
        self.leave = node_stack.aclose  # the orchestrator's node ends, and tells the others
        self.mailbox = node.mailbox(ORCHESTRATOR_MAILBOX)
        self.statuses: list[StageStatus] = []

    async def gather(self) -> None:
        async def endpoints() -> AsyncIterator[Endpoint]:
            for stage, process in enumerate(self.stages):
                where = process.listening
                role = stage_role(stage, len(self.stages))
                yield Endpoint(role, 0, where["node_id"], "127.0.0.1", where["tcp_port"], where["udp_port"])

        await self.node.gather(endpoints(), size=len(self.stages) + 1, deadline=Deadline.after(20))

    async def outcome(self, within_s: float = 20.0) -> InferenceResponse | StageFailed:
        deadline = Deadline.after(within_s)
        while True:
            delivery = await deadline.wait(self.mailbox.receive(), doing="waiting for an outcome")
            message = decode(delivery.payload)
            if not isinstance(message, StageStatus):
                return message
            self.statuses.append(message)

    async def request(self, prompt: str, *, request_id: int = 1, max_tokens: int = 5) -> None:
        entry = await Deadline.after(20).wait(self.node.resolve(ENTRY_NAME), doing="looking up pp-entry")
        request = InferenceRequest(
            request_id=request_id,
            max_tokens=max_tokens,
            raw=True,
            reply_to=str(self.node.address(ORCHESTRATOR_MAILBOX)),
            prompt=prompt,
        )
        await self.node.send(entry, encode(request))

    async def until(self, state: str) -> StageStatus:
        """The next status of this state."""
        deadline = Deadline.after(20)
        while True:
            delivery = await deadline.wait(self.mailbox.receive(), doing=f"waiting for {state}")
            message = decode(delivery.payload)
            if isinstance(message, StageStatus):
                self.statuses.append(message)
                if message.state == state:
                    return message


def stage_environment(authority: RunAuthority, folder: Path, stage: int, num_stages: int) -> dict[str, str]:
    """All of a stage node's environment but where its cluster is; its certificates are written to the folder."""
    identity = authority.mint(stage_role(stage, num_stages))
    certificates = {"ca": identity.ca_der, "leaf": identity.leaf_der}
    path = folder / f"certs-{stage}.json"
    path.write_text(json.dumps({name: base64.b64encode(der).decode() for name, der in certificates.items()}))
    return {
        "PATH": os.environ["PATH"],
        "STAGE": str(stage),
        "NUM_STAGES": str(num_stages),
        "MODEL": MODEL,
        "PPSMOKE_NODE_LEAF_KEY": identity.leaf_key.hex(),
        "PPSMOKE_NODE_CERTS": str(path),
        "PPSMOKE_NODE_LIFETIME_S": "60",
        "PPSMOKE_NODE_LIFELINE": "stdin",
        "PPSMOKE_NODE_WORKER": still_worker.TARGET,
        "STILL_PIDS": str(folder / f"pids-{stage}"),
    }


@asynccontextmanager
async def lab(
    tmp_path: Path,
    num_stages: int,
    *,
    seed: str = "",
    environments: dict[int, dict[str, str]] | None = None,
    **environment: str,
) -> AsyncIterator[Lab]:
    """Node processes that listen, not yet gathered. At the end all have ended: that nothing is left is asserted.

    seed: addresses for SEED_ADDR, "{own}" in it being the orchestrator's; none: it dials them.
    """
    run_key = new_run_key()
    authority, cluster_key = RunAuthority(run_key), derive(run_key, "cluster")
    async with AsyncExitStack() as stack:
        node_stack = await stack.enter_async_context(AsyncExitStack())
        node = await node_stack.enter_async_context(
            Node.listening(
                authority.mint("orchestrator"),
                cluster_key=cluster_key,
                code_hash=code_hash(),
                model=models.fingerprint(MODEL),
                may_own=lambda name, role: may_own(name, role, num_stages),
            )
        )
        stages = []
        for stage in range(num_stages):
            own = stage_environment(authority, tmp_path, stage, num_stages)
            own["PPSMOKE_NODE_CLUSTER_KEY"] = cluster_key.hex()
            own["SEED_ADDR"] = node.node_id + seed.replace("{own}", f"127.0.0.1:{node.tcp_port}")
            own |= {**environment, **(environments or {}).get(stage, {})}
            process = StageProcess(own, Path(own["STILL_PIDS"]))
            stack.push_async_callback(asyncio.to_thread, process.end)
            stages.append(process)
        await asyncio.gather(*(process.first_line() for process in stages))
        yield Lab(node, stages, node_stack)
    for process in stages:
        for pgid in (process.process.pid, *process.pids[:1]):
            until(lambda pgid=pgid: group_is_empty(pgid), within_s=3)  # the resource tracker is the last to go
