"""Stage actors over a network of queues, with workers in this process: a whole pipeline without a socket or a child."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ppsmoke.cluster.addresses import Address, Delivery
from ppsmoke.errors import LinkLost, WorkerLost, WorkerRefused
from ppsmoke.pipeline.messages import (
    InferenceRequest,
    InferenceResponse,
    Message,
    StageFailed,
    StageStatus,
    decode,
    encode,
)
from ppsmoke.pipeline.names import stage_name
from ppsmoke.pipeline.stage import StageActor
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.still_worker import StillWorker

ASKER = Address("f" * 16, "orchestrator")


class MemoryWorker:
    """A StillWorker behind the interface of a Bridge. faults: op count -> "die", "error", "hang", or a whole reply."""

    def __init__(self, environment: dict[str, str], faults: dict[int, Any] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.still = StillWorker(environment)
        self.faults = faults or {}
        self.ops: list[str] = []
        self.lost: asyncio.Future[WorkerLost] = loop.create_future()
        self.ready: asyncio.Future[dict] = loop.create_future()
        self.ready.set_result(self.still.ready())

    async def call(self, op: str, *, deadline_s: float, **fields: Any) -> dict[str, Any]:
        self.ops.append(op)
        fault = self.faults.get(len(self.ops))
        if fault == "hang":
            await asyncio.sleep(deadline_s)
        if fault in ("die", "hang"):
            self.lost.set_result(WorkerLost("as asked", phase="ask", stage=self.still.stage, detail="its last words"))
        if self.lost.done():
            raise self.lost.result()
        await asyncio.sleep(0)  # others run meanwhile, as with a process
        reply = self.still.answer({"op": op, **json.loads(json.dumps(fields))})
        if isinstance(fault, dict):
            return {**reply, **fault}
        if fault == "error" or "error" in reply:
            error = reply.get("error", {"kind": "fault", "message": "as asked"})
            raise WorkerRefused(f"{op}: {error['message']}", kind=error["kind"], phase="ask", stage=self.still.stage)
        return reply


class MemoryNet:
    """Mailboxes by node id. `tap` sees (sender role, message) of every send and says how many copies arrive."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[Delivery]] = {ASKER.node_id: asyncio.Queue()}
        self.names: dict[str, Address] = {}
        self.tap: Callable[[str, Message], int] = lambda role, message: 1
        self.unreachable: set[str] = set()
        self.refused: list[Message] = []  # what was for one of these

    def deliver(self, sender: str, role: str, to: Address, payload: bytes) -> None:
        for _ in range(self.tap(role, decode(payload))):
            self.queues[to.node_id].put_nowait(Delivery(sender, role, payload))


class MemoryPost:
    """One node's way into the net, as a stage sees it; also its mailbox."""

    def __init__(self, net: MemoryNet, node_id: str, role: str) -> None:
        self._net, self._node_id, self._role = net, node_id, role
        net.queues.setdefault(node_id, asyncio.Queue())

    async def send(self, to: Address, payload: bytes) -> None:
        await asyncio.sleep(0)
        if to.node_id in self._net.unreachable:
            self._net.refused.append(decode(payload))
            raise LinkLost(f"no link to {to.node_id}", phase="ask")
        self._net.deliver(self._node_id, self._role, to, payload)

    async def resolve(self, name: str) -> Address:
        return self._net.names[name]

    async def receive(self) -> Delivery:
        return await self._net.queues[self._node_id].get()


class Chain:
    """A running pipeline and an asker in front of it."""

    def __init__(self, net: MemoryNet, workers: list[MemoryWorker], tasks: list[asyncio.Task]) -> None:
        self.net, self.workers, self.tasks = net, workers, tasks
        self.statuses: list[StageStatus] = []
        self._post = MemoryPost(net, ASKER.node_id, "orchestrator")

    def request(self, prompt: str = "Say hello", *, request_id: int = 7, max_tokens: int = 5, raw: bool = True) -> None:
        message = InferenceRequest(
            request_id=request_id, max_tokens=max_tokens, raw=raw, reply_to=str(ASKER), prompt=prompt
        )
        self.net.deliver(ASKER.node_id, "orchestrator", self.net.names["pp-entry"], encode(message))

    async def outcome(self) -> InferenceResponse | StageFailed:
        """The next message that ends a request; statuses on the way are kept."""
        while True:
            delivery = await Deadline.after(10).wait(self._post.receive(), doing="waiting for an outcome")
            message = decode(delivery.payload)
            if not isinstance(message, StageStatus):
                return message
            self.statuses.append(message)

    async def ask(self, prompt: str = "Say hello", **more: Any) -> InferenceResponse | StageFailed:
        self.request(prompt, **more)
        return await self.outcome()


@asynccontextmanager
async def chain(
    num_stages: int,
    *,
    faults: dict[int, dict[int, Any]] | None = None,
    environments: dict[int, dict[str, str]] | None = None,
    step_deadline_s: float = 5.0,
    busy_grace_s: float = 0.0,
    **environment: str,
) -> AsyncIterator[Chain]:
    """num_stages actors that run; faults and environments by stage, environment for all."""
    net, workers, tasks = MemoryNet(), [], []
    async with AsyncExitStack() as stack:
        for stage in range(num_stages):
            role, node_id = f"stage-{stage}-of-{num_stages}", f"{stage:016x}"
            own = {
                "STAGE": str(stage),
                "NUM_STAGES": str(num_stages),
                **environment,
                **(environments or {}).get(stage, {}),
            }
            worker = MemoryWorker(own, (faults or {}).get(stage))
            post = MemoryPost(net, node_id, role)
            net.names[stage_name(stage)] = Address(node_id, "stage")
            actor = StageActor(
                stage=stage,
                num_stages=num_stages,
                worker=worker,
                post=post,
                mailbox=post,
                orchestrator=ASKER,
                step_deadline_s=step_deadline_s,
                busy_grace_s=busy_grace_s,
            )
            workers.append(worker)
            tasks.append(asyncio.ensure_future(actor.run()))
        net.names["pp-entry"] = net.names[stage_name(0)]
        stack.push_async_callback(cancel_and_reap, *tasks)
        yield Chain(net, workers, tasks)
