"""The orchestrator of a soak, in a process of its own at home: one request after the other, each answer judged.

python -m tests.lab.soak.asker TASK: the task is a JSON object (Task). Lines on stdout, each a JSON object: {"ready":
stage} for each life of each stage, {"request": fields of Outcome}, {"error": text} where nothing can go on. It ends,
after the request at hand, when its stdin does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

from ppsmoke import models
from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.events import Event, LinkUp
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, SmokeError, StageError
from ppsmoke.keys import derive
from ppsmoke.package import code_hash
from ppsmoke.pipeline.messages import (
    InferenceRequest,
    InferenceResponse,
    Reset,
    StageFailed,
    StageStatus,
    decode,
    encode,
)
from ppsmoke.pipeline.names import (
    ENTRY_NAME,
    ORCHESTRATOR_MAILBOX,
    ORCHESTRATOR_ROLE,
    may_own,
    stage_name,
    stage_role,
)
from ppsmoke.waiting import Deadline, cancel_and_reap, running
from tests.lab import still_worker
from tests.lab.expected import expected
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT
from tests.lab.paths import DATA, TINY_F32

GATHER_BUDGET_S = 60.0
RESOLVE_BUDGET_S = 60.0
READY_BUDGET_S = 180.0  # of a stage's new life; the first one compiles
REQUEST_BUDGET_S = 60.0  # by then there is an answer, or a cause
MAX_TOKENS = 8
PAUSE_S = 0.05  # after an answer
PAUSE_AFTER_FAILURE_S = 2.0  # what has just been found out of reach is not asked again at once
GIVE_UP_S = 1.0  # to say that a request is given up
LETTERS = "abcdefghijklmnopqrstuvwxyz  "
TINY_PROMPTS = ("hello", "chat", "unicode")  # ids in tests/data/tiny.json

Verdict = Literal["right", "wrong", "failed", "lost"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """endpoints: fields of Endpoint, of those that can be dialled; size: members, this one among them; worker: "still"
    or "tiny"; model: what the stages have as MODEL."""

    run_key: str
    num_stages: int
    worker: str
    model: str
    endpoints: list[dict[str, Any]]
    size: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a request. lost: neither an answer nor a cause within REQUEST_BUDGET_S. Monotonic times."""

    number: int
    asked_s: float
    ended_s: float
    verdict: Verdict
    cause: str = ""


class Asker:
    def __init__(self, node: Node, task: Task) -> None:
        self._node, self._task = node, task
        authority = RunAuthority(bytes.fromhex(task.run_key))
        self._stage_of = {
            authority.mint(stage_role(stage, task.num_stages)).node_id: stage for stage in range(task.num_stages)
        }
        self._ready: set[int] = set()
        self._changed = asyncio.Event()
        self._expected = 0
        self._settled: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()

    async def gather(self) -> None:
        async def endpoints() -> AsyncIterator[Endpoint]:
            for endpoint in self._task.endpoints:
                yield Endpoint(**endpoint)

        await self._node.gather(endpoints(), size=self._task.size, deadline=Deadline.after(GATHER_BUDGET_S))
        for stage in range(self._task.num_stages):
            name = stage_name(stage)
            await Deadline.after(RESOLVE_BUDGET_S).wait(self._node.resolve(name), doing=f"looking up {name}")

    async def ask_until(self, ended: asyncio.Event) -> None:
        draw = random.Random(f"requests {self._task.seed}")
        for number in itertools.count(1):
            await self._all_ready()
            if ended.is_set():
                return
            outcome = await self._ask(number, *draw_request(draw, self._task.worker))
            say(request=asdict(outcome))
            await asyncio.sleep(PAUSE_S if outcome.verdict == "right" else PAUSE_AFTER_FAILURE_S)

    async def read_mail(self) -> NoReturn:
        mailbox = self._node.mailbox(ORCHESTRATOR_MAILBOX)
        while True:
            message = decode((await mailbox.receive()).payload)
            match message:
                case StageStatus(state="ready", stage=stage):
                    self._ready.add(stage)
                    say(ready=stage)
                    self._changed.set()
                case InferenceResponse(request_id=self._expected) if not self._settled.done():
                    self._settled.set_result(message)
                case StageFailed(request_id=number) if number in (0, self._expected) and not self._settled.done():
                    self._settled.set_exception(StageError(message.cause, phase=message.phase, stage=message.stage))

    async def watch_lives(self, events: asyncio.Queue[Event]) -> NoReturn:
        """A stage in a new life has yet to say that it is ready."""
        while True:
            match await events.get():
                case LinkUp(peer=peer, restarted=True) if peer in self._stage_of:
                    self._ready.discard(self._stage_of[peer])

    async def _all_ready(self) -> None:
        deadline = Deadline.after(READY_BUDGET_S)
        while len(self._ready) < self._task.num_stages:
            self._changed.clear()
            missing = sorted(set(range(self._task.num_stages)) - self._ready)
            await deadline.wait(self._changed.wait(), doing=f"waiting for stages {missing} to be ready")

    async def _ask(self, number: int, prompt: str, right: list[int]) -> Outcome:
        asked_s, cause = time.monotonic(), ""
        verdict: Verdict = "right"
        self._expected, self._settled = number, asyncio.get_running_loop().create_future()
        try:
            answer = await Deadline.after(REQUEST_BUDGET_S).wait(self._answer(number, prompt), doing="a request")
            if list(answer.token_ids) != right:
                verdict, cause = "wrong", f"{list(answer.token_ids)}, not {right}, to {prompt!r}"
        except DeadlineExceeded:
            verdict = "lost"
        except SmokeError as error:
            verdict, cause = "failed", str(error)
        ended_s = time.monotonic()
        if verdict in ("failed", "lost"):
            await self._give_up(number)
        return Outcome(number=number, asked_s=asked_s, ended_s=ended_s, verdict=verdict, cause=cause)

    async def _answer(self, number: int, prompt: str) -> InferenceResponse:
        """Raises SmokeError: what a stage said, or that one is out of reach or in a new life."""
        request = InferenceRequest(
            request_id=number,
            reply_to=str(self._node.address(ORCHESTRATOR_MAILBOX)),
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            raw=True,
        )
        guard = asyncio.ensure_future(self._node.guard(list(self._stage_of)))
        sending = asyncio.ensure_future(self._send_to_entry(encode(request)))
        try:
            await asyncio.wait({guard, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await asyncio.wait({guard, self._settled}, return_when=asyncio.FIRST_COMPLETED)
            return self._settled.result() if self._settled.done() else guard.result()
        finally:
            await cancel_and_reap(guard, sending)

    async def _send_to_entry(self, payload: bytes) -> None:
        await self._node.send(await self._node.resolve(ENTRY_NAME), payload)

    async def _give_up(self, number: int) -> None:
        """Stage 0 may wait for a token that nobody will send any more."""
        with suppress(SmokeError):
            telling = self._send_to_entry(encode(Reset(request_id=number)))
            await Deadline.after(GIVE_UP_S).wait(telling, doing="giving a request up")


def draw_request(draw: random.Random, worker: str) -> tuple[str, list[int]]:
    """A prompt, and the tokens that are right."""
    if worker == "tiny":
        chosen = draw.choice(TINY_PROMPTS)
        models_known = json.loads((DATA / "tiny.json").read_text())["models"]
        found = next(model for model in models_known if model["gguf"] == TINY_F32.name)
        prompt = next(entry["prompt"] for entry in found["prompts"] if entry["id"] == chosen)
        return prompt, expected(TINY_F32.name, chosen, "raw")["steps"]["ids"][:MAX_TOKENS]
    prompt = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 40)))
    return prompt, still_worker.continuation(still_worker.encode(prompt, raw=True), MAX_TOKENS)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def main(task: Task) -> None:
    run_key, ended = bytes.fromhex(task.run_key), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: ended.set())
    try:
        async with Node.listening(
            RunAuthority(run_key).mint(ORCHESTRATOR_ROLE),
            cluster_key=derive(run_key, "cluster"),
            tcp=("0.0.0.0", TCP_PORT),
            udp=("0.0.0.0", UDP_PORT),
            code_hash=code_hash(),
            model=models.fingerprint(task.model),
            may_own=lambda name, role: may_own(name, role, task.num_stages),
        ) as node:
            asker = Asker(node, task)
            async with (
                running(asker.watch_lives(node.subscribe()), name="lives"),
                running(asker.read_mail(), name="mail"),
            ):
                await asker.gather()
                await asker.ask_until(ended)
    except SmokeError as error:
        say(error=str(error))


if __name__ == "__main__":
    asyncio.run(main(Task(**json.loads(sys.argv[1]))))
