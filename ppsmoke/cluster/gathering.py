"""Bringing a cluster together: dial what becomes known, wait until enough are alive and linked, say who is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.paths import unreachable
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.roster import Roster
from ppsmoke.errors import DeadlineExceeded, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap

REACH_WITHIN_S = 16.0  # from when a node is known to listen: the dials have timed out thrice, the relays have answered


class Gathering:
    def __init__(
        self,
        roster: Roster,
        changed: Signal,
        *,
        dial: Callable[[Endpoint], Awaitable[None]],
        is_alive: Callable[[Peer], bool],
        reach_within_s: float | None,
    ) -> None:
        self._roster = roster
        self._peers = roster.peers
        self._reach_within_s = reach_within_s
        self._now = asyncio.get_running_loop().time
        self._known_at: dict[str, float] = {}  # by role
        self._all_known_at: float | None = None  # since when there are no more endpoints to come
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
                await self._changed.wait(self._out_of_reach_in_s(size))
        finally:
            await cancel_and_reap(feeding, *self._dials)

    async def _feed(self, endpoints: AsyncIterator[Endpoint]) -> None:
        async for endpoint in endpoints:
            known = self._known.get(endpoint.role)
            if known is None or known.generation <= endpoint.generation:
                self._known[endpoint.role] = endpoint
                self._known_at[endpoint.role] = self._now()
                self._dials[self._start(self._dial(endpoint), name=f"dial {endpoint.role}")] = endpoint
        self._all_known_at = self._now()

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

    def _out_of_reach_in_s(self, size: int) -> float | None:
        """Until somebody who is missing counts as out of reach; None: nobody does. Raises LinkError then."""
        if self._reach_within_s is None:
            return None
        soonest_s: float | None = None
        for role, endpoint in self._known.items():
            peer = self._peers.get(endpoint.node_id)
            if peer is None or peer.epoch == 0:  # never linked
                left_s = self._known_at[role] + self._reach_within_s - self._now()
                if left_s <= 0:
                    raise self._unreachable(role, peer)
                soonest_s = left_s if soonest_s is None else min(soonest_s, left_s)
        if self._all_known_at is not None and self._there() < size and len(self._known) < size - 1:
            left_s = self._all_known_at + self._reach_within_s - self._now()
            if left_s <= 0:
                missing = size - self._there()
                raise self._unreachable(f"{missing} of {size} members", None)
            soonest_s = left_s if soonest_s is None else min(soonest_s, left_s)
        return soonest_s

    def _unreachable(self, name: str, peer: Peer | None) -> LinkError:
        own = [candidate for candidate in self._roster.candidates if candidate.kind == "mapped"]
        known = peer.candidates_in_order() if peer is not None else []
        cause, hint = unreachable(name, peer.why_not_linked() if peer else "", candidates=known, own=own)
        return LinkError(cause, hint=hint)

    def _there(self) -> int:
        return 1 + sum(map(self._is_there, self._peers.values()))

    def _is_complete(self, size: int) -> bool:
        expected = [self._peers.get(endpoint.node_id) for endpoint in self._known.values()]
        if not all(peer is not None and self._is_there(peer) for peer in expected):
            return False
        return self._there() >= size

    def _is_there(self, peer: Peer) -> bool:
        return peer.link is not None and not peer.superseded and self._is_alive(peer)

    def _what_is_missing(self, size: int) -> str:
        reasons = [f"{self._there()} of {size} there"]
        for role, endpoint in sorted(self._known.items()):
            peer = self._peers.get(endpoint.node_id)
            if peer is None or peer.link is None:
                reasons.append(f"{role}: {peer.why_not_linked() if peer else 'not dialled yet'}")
            elif not self._is_alive(peer):
                reasons.append(f"{role}: linked, and not yet a member")
        if len(self._known) < size - 1:
            reasons.append(f"{size - 1 - len(self._known)} not known yet")
        return "; ".join(reasons)
