"""Keeping links: dial what can be dialled, the likeliest first, again after a pause with jitter, until told to stop."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.handshake import HelloRefused, KeyRefused
from ppsmoke.cluster.link import DuplicateLink, Link
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.sockets import LinkMaker
from ppsmoke.errors import LinkError
from ppsmoke.waiting import cancel_and_reap

STAGGER_S = 0.25  # between the candidates of one peer (facts/network.md, 4.6)
ACCEPTOR_PAUSE_S = 1.0  # whoever dialled the lost link is first to dial it again
KEY_REFUSALS = 3  # a hang-up may be chance once or twice


class Dialler:
    """One task per peer that is to be kept; all of them end with close()."""

    def __init__(self, maker: LinkMaker, changed: Signal, rng: random.Random) -> None:
        self._maker = maker
        self._changed = changed
        self._rng = rng
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def keep(self, peer: Peer) -> None:
        """Have a link to this peer whenever it can be had. Asking twice is the same as once."""
        task = self._tasks.get(peer.node_id)
        if task is None or task.done():
            task = asyncio.ensure_future(self._keep(peer))
            task.set_name(f"keep {peer.name}")
            self._tasks[peer.node_id] = task

    async def close(self) -> None:
        await cancel_and_reap(*self._tasks.values())

    async def _keep(self, peer: Peer) -> None:
        failures = key_refusals = 0
        pause_s = 0.0
        while not peer.superseded and peer.refusal is None:
            if peer.link is not None or peer.left is not None or not candidates_of(peer):
                linked = peer.link
                await self._changed.wait()
                if linked is not None:
                    failures, pause_s = 0, 0.0 if linked.dialled else ACCEPTOR_PAUSE_S
                continue
            if pause_s > 0 and await self._linked_meanwhile(peer, pause_s):
                continue
            try:
                await self._dial_once(peer)
                key_refusals = 0
            except LinkError as error:
                peer.last_error = error
                key_refusals = key_refusals + 1 if isinstance(error, KeyRefused) else 0
                if isinstance(error, HelloRefused) or key_refusals >= KEY_REFUSALS:
                    peer.refusal = error
                self._changed.notify()
            failures += 1
            timing = self._maker.timing
            pause_s = self._rng.uniform(0, min(timing.redial_most_s, timing.redial_s * 2 ** min(failures, 10)))

    async def _linked_meanwhile(self, peer: Peer, pause_s: float) -> bool:
        """Wait, but not longer than until the peer has dialled us or is no longer wanted."""
        now = asyncio.get_running_loop().time
        until = now() + pause_s
        while (left_s := until - now()) > 0:
            await self._changed.wait(left_s)
            if peer.link is not None or peer.left is not None or peer.superseded:
                return True
        return False

    async def _dial_once(self, peer: Peer) -> None:
        def dial(candidate: Candidate) -> Callable[[], Coroutine[Any, Any, Link]]:
            return lambda: self._maker.dial(candidate, peer_id=peer.node_id, name=peer.name)

        try:
            await first_of([dial(candidate) for candidate in candidates_of(peer)], stagger_s=STAGGER_S)
        except DuplicateLink:
            if peer.link is None:  # the one the peer keeps is about to be up here, or about to be found dead there
                raise


def candidates_of(peer: Peer) -> list[Candidate]:
    """Where to dial it, each socket once: where we were told, then its own host's addresses, then mapped ones."""
    found = [peer.endpoint.candidate] if peer.endpoint is not None else []
    for kind in ("host", "mapped"):
        found += [candidate for candidate in (*peer.candidates, *peer.gossiped) if candidate.kind == kind]
    unique = {(candidate.host, candidate.tcp_port): candidate for candidate in reversed(found)}
    return list(reversed(unique.values()))


async def first_of(attempts: Sequence[Callable[[], Coroutine[Any, Any, Link]]], *, stagger_s: float) -> Link:
    """The first link that comes up (RFC 8305's race): each attempt starts stagger_s after the one before, or as soon
    as that has failed. The rest are cancelled. If all fail, raises the error that says most."""
    waiting, running, errors = deque(attempts), set(), []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(waiting.popleft()()))
            timeout_s = stagger_s if waiting else None
            done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, LinkError):
                    raise error
                errors.append(error)
        raise _most_telling(errors)
    finally:
        await cancel_and_reap(*running)


def _most_telling(errors: Sequence[LinkError]) -> LinkError:
    for kind in (HelloRefused, KeyRefused, DuplicateLink):
        for error in errors:
            if isinstance(error, kind):
                return error
    if len(errors) == 1:
        return errors[0]
    return LinkError("; ".join(dict.fromkeys(error.cause for error in errors)) or "nowhere to dial")
