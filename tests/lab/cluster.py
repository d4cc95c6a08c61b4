"""Clusters of real nodes on loopback for tests, and what an observer may ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.identity import Identity, RunAuthority
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.node import Node
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline

RUN_KEY = bytes(range(32))
CODE_HASH, MODEL = "c0de" * 10, "30de1" * 8
WAIT_S = 20.0  # for what should take milliseconds: a slow machine must not fail a test


def may_own(name: str, role: str) -> bool:
    """pp-entry is stage 0's, pp-exit the last one's, pp-stage-i stage i's."""
    if not role.startswith("stage-"):
        return False
    index, count = role.removeprefix("stage-").split("-of-")
    return name in {f"pp-stage-{index}", *(["pp-entry"] if index == "0" else [])} or (
        name == "pp-exit" and int(index) == int(count) - 1
    )


class Lab:
    """Nodes of one run; `options` are what every node gets unless asked otherwise."""

    def __init__(self, stack: AsyncExitStack, run_key: bytes = RUN_KEY, **options: Any) -> None:
        self.authority = RunAuthority(run_key)
        self.run_key = run_key
        self._stack = stack
        self._options = options

    async def node(self, role: str, *, generation: int = 0, identity: Identity | None = None, **options: Any) -> Node:
        return await self._stack.enter_async_context(self.listening(role, generation, identity, **options))

    def listening(self, role: str, generation: int = 0, identity: Identity | None = None, **options: Any):
        settings = {"code_hash": CODE_HASH, "model": MODEL, "may_own": may_own, "udp": None} | self._options | options
        settings.setdefault("cluster_key", derive(self.run_key, "cluster"))
        return Node.listening(identity or self.authority.mint(role, generation), **settings)

    async def trio(self, **options: Any) -> tuple[Node, Node, Node]:
        """The orchestrator and two stages, gathered."""
        nodes = [await self.node(role, **options) for role in ("orchestrator", "stage-0-of-2", "stage-1-of-2")]
        await nodes[0].gather(endpoints_of(*nodes[1:]), size=3, deadline=Deadline.after(WAIT_S))
        return nodes[0], nodes[1], nodes[2]


@asynccontextmanager
async def lab(**options: Any) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        yield Lab(stack, **options)


def endpoint_of(node: Node, *, generation: int = 0) -> Endpoint:
    return Endpoint(node.role, generation, node.node_id, "127.0.0.1", node.tcp_port, node.udp_port)


async def endpoints_of(*nodes: Node) -> AsyncIterator[Endpoint]:
    for node in nodes:
        yield endpoint_of(node)


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """The scenario in a loop of its own, at whose end no task may be left, and no error that nobody looked at."""
    unseen: list[str] = []

    async def observed() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(str(context)))
        result = await Deadline.after(3 * WAIT_S).wait(scenario, doing="the whole scenario")
        await settled()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks left behind: {left}"
        return result

    result = asyncio.run(observed())
    assert not unseen, unseen
    return result


async def settled(turns: int = 5) -> None:
    """A few turns of the loop: callbacks that are due have run."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], *, doing: str = "a condition") -> Any:
    """Polls with the loop's turns in between; what it waits for comes from sockets, so no clock can be injected."""

    async def poll() -> Any:
        while not (value := condition()):
            await asyncio.sleep(0.002)
        return value

    return await Deadline.after(WAIT_S).wait(poll(), doing=doing)


def within(awaitable: Any, doing: str = "a step of the scenario") -> Any:
    return Deadline.after(WAIT_S).wait(awaitable, doing=doing)


async def next_event(events: asyncio.Queue[Any], *kinds: type) -> Any:
    """The next event of these kinds; others before it are skipped."""

    async def find() -> Any:
        while not isinstance(event := await events.get(), kinds):
            pass
        return event

    return await within(find(), f"an event of {[kind.__name__ for kind in kinds]}")


def link_between(one: Node, other: Node):
    """The link that `one` uses towards `other` now."""
    peer = one._roster.peers.get(other.node_id)
    return peer.link if peer is not None else None


def one_link_each_way(one: Node, other: Node) -> bool:
    mine, theirs = link_between(one, other), link_between(other, one)
    return mine is not None and theirs is not None and mine.id == theirs.id


async def receive_all(node: Node, mailbox: str, count: int) -> list[bytes]:
    box = node.mailbox(mailbox)
    return [(await within(box.receive(), f"message {number}")).payload for number in range(count)]


# Everything about silence, fast: a tenth of a second where a run has seconds.
IMPATIENT = LinkTiming(connect_s=2.0, handshake_s=2.0, ping_after_s=0.1, down_after_s=0.3, bye_s=0.5, redial_s=0.01)
