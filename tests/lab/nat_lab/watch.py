"""What a node sees of its peers: since when each has been on which path, and when its first message came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.node import Node
from ppsmoke.errors import LinkLost
from ppsmoke.waiting import running

GREETINGS = "greetings"  # the mailbox that tells when a first message came
LOOK_EVERY_S = 0.01  # at the links, whose changes of path are no events
GREET_EVERY_S = 0.1


class Watch:
    """Times are of the monotonic clock, which all processes of a machine share."""

    def __init__(self, node: Node) -> None:
        self.since = time.monotonic()
        self._node = node
        self._paths: dict[str, list[tuple[float, str]]] = {}  # by peer: since when on which path, "" is none
        self._greeted: dict[str, float] = {}  # by sender: when its first message came

    @classmethod
    @asynccontextmanager
    async def over(cls, node: Node) -> AsyncIterator[Watch]:
        """For this block."""
        watch = cls(node)
        async with (
            running(watch._watch_paths(), name="watch over paths"),
            running(watch._read_greetings(), name="greetings"),
        ):
            yield watch

    def seen(self) -> dict[str, Any]:
        """As JSON can hold it; at: since when there has been a watch, so since when the node has listened."""
        return {"at": self.since, "paths": self._paths, "greeted": self._greeted}

    async def greet(self, peer: str) -> None:
        """A message to the peer, as soon as it can be had; returns when it is in its window."""
        while True:
            with suppress(LinkLost):  # out of reach so far
                return await self._node.send(Address(peer, GREETINGS), b"hello")
            await asyncio.sleep(GREET_EVERY_S)

    async def _watch_paths(self) -> None:
        while True:
            now, paths = time.monotonic(), {link.peer: link.path for link in self._node.links()}
            for peer in paths.keys() | self._paths.keys():
                history, path = self._paths.setdefault(peer, []), paths.get(peer, "")
                if not history or history[-1][1] != path:
                    history.append((now, path))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _read_greetings(self) -> None:
        mailbox = self._node.mailbox(GREETINGS)
        while True:
            delivery = await mailbox.receive()
            self._greeted.setdefault(delivery.sender, time.monotonic())
