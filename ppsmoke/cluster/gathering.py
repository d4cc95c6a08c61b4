"""Bringing a cluster together: dial what becomes known, wait until enough are alive and linked, say who is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.peer import Peer
from ppsmoke.errors import DeadlineExceeded
from ppsmoke.waiting import Deadline, cancel_and_reap


class Gathering:
    def __init__(
        self,
        peers: dict[str, Peer],
        changed: Signal,
        *,
        dial: Callable[[Endpoint], Awaitable[None]],
        is_alive: Callable[[Peer], bool],
    ) -> None:
        self._peers = peers
        self._changed = changed
        self._dial = dial
        self._is_alive = is_alive
        self._known: dict[str, Endpoint] = {}  # by role, the latest generation
        self._dials: dict[asyncio.Future[None], Endpoint] = {}

    async def run(self, endpoints: AsyncIterator[Endpoint], *, size: int, deadline: Deadline) -> None:
        """See Node.gather."""
        doing = f"gathering {size} members"
        try:
            await deadline.wait(self._until_complete(endpoints, size=size), doing=doing)
        except DeadlineExceeded:
            raise deadline.expired(f"{doing} ({self._what_is_missing(size)})") from None

    async def _until_complete(self, endpoints: AsyncIterator[Endpoint], *, size: int) -> None:
        feeding = self._start(self._feed(endpoints), name="endpoints")
        try:
            while True:
                self._raise_failures(feeding)
                if self._is_complete(size):
                    return
                await self._changed.wait()
        finally:
            await cancel_and_reap(feeding, *self._dials)

    async def _feed(self, endpoints: AsyncIterator[Endpoint]) -> None:
        async for endpoint in endpoints:
            known = self._known.get(endpoint.role)
            if known is None or known.generation <= endpoint.generation:
                self._known[endpoint.role] = endpoint
                self._dials[self._start(self._dial(endpoint), name=f"dial {endpoint.role}")] = endpoint

    def _start(self, awaitable: Awaitable[None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(awaitable)
        task.set_name(name)
        task.add_done_callback(lambda _: self._changed.notify())
        return task

    def _raise_failures(self, feeding: asyncio.Task[None]) -> None:
        if feeding.done():
            feeding.result()
        for dial, endpoint in list(self._dials.items()):
            if dial.done() and self._known[endpoint.role] is endpoint:
                dial.result()
        for peer in self._peers.values():
            if peer.refusal is not None and not peer.superseded:
                raise peer.refusal

    def _is_complete(self, size: int) -> bool:
        expected = [self._peers.get(endpoint.node_id) for endpoint in self._known.values()]
        if not all(peer is not None and self._is_there(peer) for peer in expected):
            return False
        return 1 + sum(map(self._is_there, self._peers.values())) >= size

    def _is_there(self, peer: Peer) -> bool:
        return peer.link is not None and not peer.superseded and self._is_alive(peer)

    def _what_is_missing(self, size: int) -> str:
        there = 1 + sum(map(self._is_there, self._peers.values()))
        reasons = [f"{there} of {size} there"]
        for role, endpoint in sorted(self._known.items()):
            peer = self._peers.get(endpoint.node_id)
            if peer is None or peer.link is None:
                reasons.append(f"{role}: {peer.why_not_linked() if peer else 'not dialled yet'}")
            elif not self._is_alive(peer):
                reasons.append(f"{role}: linked, and not yet a member")
        if len(self._known) < size - 1:
            reasons.append(f"{size - 1 - len(self._known)} not known yet")
        return "; ".join(reasons)
