"""A real node of the cluster in a host of the lab, told what to do over stdin, in JSON lines; answers on stdout.

python -m tests.lab.nat_lab.agent. Requests run side by side and carry an id, which their answer repeats. It ends when
its stdin does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from ppsmoke.cluster.addresses import Candidate, Endpoint
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, SmokeError
from ppsmoke.keys import derive
from ppsmoke.pipeline.messages import InferenceRequest, InferenceResponse, StageFailed, StageStatus, decode, encode
from ppsmoke.pipeline.names import ENTRY_NAME, ORCHESTRATOR_MAILBOX, may_own
from ppsmoke.stage_node import SEED_DIAL_S
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.nat_lab.watch import Watch

MAX_LINE_BYTES = 1 << 20


class Agent:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._node: Node
        self._watch: Watch

    async def obey(self, request: dict[str, Any]) -> Any:
        """The answer to a request: of the method that is called like its op."""
        arguments = {name: value for name, value in request.items() if name not in ("op", "id")}
        return await getattr(self, f"on_{request['op']}")(**arguments)

    async def on_listen(
        self,
        *,
        run_key: str,
        role: str,
        num_stages: int,
        code_hash: str,
        model: str,
        tcp: tuple[str, int],
        udp: tuple[str, int] | None,
        advertise: Sequence[Sequence[Any]],
    ) -> dict[str, Any]:
        key = bytes.fromhex(run_key)
        self._node = await self._stack.enter_async_context(
            Node.listening(
                RunAuthority(key).mint(role),
                cluster_key=derive(key, "cluster"),
                tcp=tuple(tcp),
                udp=tuple(udp) if udp else None,
                code_hash=code_hash,
                model=model,
                may_own=lambda name, owner: may_own(name, owner, num_stages),
                advertise=[Candidate(*candidate) for candidate in advertise],
            )
        )
        self._watch = await self._stack.enter_async_context(Watch.over(self._node))
        return {"node_id": self._node.node_id}

    async def on_dial(self, *, endpoints: list[dict[str, Any]], within_s: float) -> None:
        """Keep a link to a node: one of its endpoints after the other until there is one, as a stage does it."""

        async def in_turn() -> None:
            for endpoint in itertools.cycle(endpoints):
                with suppress(DeadlineExceeded):
                    return await Deadline.after(SEED_DIAL_S).wait(self._node.dial(Endpoint(**endpoint)), doing="")

        await Deadline.after(within_s).wait(in_turn(), doing="dialling")

    async def on_gather(self, *, endpoints: list[dict[str, Any]], size: int, within_s: float) -> None:
        async def known() -> AsyncIterator[Endpoint]:
            for endpoint in endpoints:
                yield Endpoint(**endpoint)

        await self._node.gather(known(), size=size, deadline=Deadline.after(within_s))

    async def on_greet(self, *, peer: str, within_s: float) -> None:
        """A message to the peer, as soon as it can be had; returns when it is in its window."""

        await Deadline.after(within_s).wait(self._watch.greet(peer), doing=f"greeting {peer}")

    async def on_seen(self) -> dict[str, Any]:
        """Since when each peer has been on which path, when its first message came, and who is a member."""
        members = {member.node_id: member.state for member in self._node.members()}
        links = {link.peer: link.rtt_ms for link in self._node.links()}
        return {**self._watch.seen(), "members": members, "rtt_ms": links}

    async def on_infer(
        self, *, gather: dict[str, Any], await_ready: dict[str, Any], ask: dict[str, Any]
    ) -> dict[str, Any]:
        """The three requests of these names, one after the other."""
        await self.on_gather(**gather)
        await self.on_await_ready(**await_ready)
        return await self.on_ask(**ask)

    async def on_ask(self, *, prompt: str, raw: bool, max_tokens: int, within_s: float) -> dict[str, Any]:
        """Ask the stages, once both are ready. As smoke.py does, without its report."""
        deadline = Deadline.after(within_s)
        entry = await deadline.wait(self._node.resolve(ENTRY_NAME), doing="looking up pp-entry")
        request = InferenceRequest(
            request_id=1,
            reply_to=str(self._node.address(ORCHESTRATOR_MAILBOX)),
            prompt=prompt,
            max_tokens=max_tokens,
            raw=raw,
        )
        await deadline.wait(self._node.send(entry, encode(request)), doing="sending the request")
        while True:
            received = self._node.mailbox(ORCHESTRATOR_MAILBOX).receive()
            message = decode((await deadline.wait(received, doing="waiting for the answer")).payload)
            if isinstance(message, StageFailed):
                return {"failed": f"stage {message.stage}: {message.phase}: {message.cause}"}
            if isinstance(message, InferenceResponse):
                return {"token_ids": message.token_ids, "text": message.text}

    async def on_await_ready(self, *, stages: int, within_s: float) -> list[int]:
        """Until so many stages have said that they are ready."""
        deadline, ready = Deadline.after(within_s), set()
        while len(ready) < stages:
            received = self._node.mailbox(ORCHESTRATOR_MAILBOX).receive()
            message = decode((await deadline.wait(received, doing=f"{stages} stages ready")).payload)
            if isinstance(message, StageFailed):
                raise SmokeError(f"stage {message.stage}: {message.cause}", phase=message.phase)
            if isinstance(message, StageStatus) and message.state == "ready":
                ready.add(message.stage)
        return sorted(ready)


async def _answer(agent: Agent, request: dict[str, Any]) -> None:
    try:
        answer = {"result": await agent.obey(request)}
    except SmokeError as error:
        answer = {"error": str(error), "hint": error.hint}
    print(json.dumps({"id": request["id"], **answer}), flush=True)


async def main() -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    async with AsyncExitStack() as stack:
        agent = Agent(stack)
        try:
            while line := await reader.readline():
                task = asyncio.ensure_future(_answer(agent, json.loads(line)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            await cancel_and_reap(*tasks)


if __name__ == "__main__":
    asyncio.run(main())
