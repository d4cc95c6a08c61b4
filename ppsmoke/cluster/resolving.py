"""From a name to a mailbox: the best claimant that is linked, and whose certificate's role may own the name."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.names import NameEntry
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.roster import Roster

BETTER_OWNER_WAIT_S = 10.0  # a name's best claimant has this long to be linked before the next best is taken

_log = logging.getLogger("ppsmoke.cluster")


class Claimant(Protocol):
    node_id: str
    role: str


class Resolver:
    def __init__(
        self,
        own: Claimant,
        lookup: Callable[[str], list[NameEntry]],
        may_own: Callable[[str, str], bool],
        roster: Roster,
        changed: Signal,
        reach: Callable[[Peer], None],
    ) -> None:
        """lookup(name): entries, the best first; reach(peer): have a link to it if it can be had."""
        self._own = own
        self._lookup = lookup
        self._may_own = may_own
        self._roster = roster
        self._changed = changed
        self._reach = reach
        self.counts: Counter[str] = Counter()  # false-name: claims without the right to them, each once
        self._liars: set[tuple[str, str]] = set()  # (node id, name): told of once

    async def resolve(self, name: str) -> Address:
        """See Node.resolve."""
        seen_at: dict[str, float] = {}
        now = asyncio.get_running_loop().time
        while True:
            pause_s = None
            for entry in self._lookup(name):
                if entry.owner == self._own.node_id:
                    verdict = self._may_own(name, self._own.role)
                else:
                    verdict = self._judge(self._roster.peer(entry.owner), name, entry.generation)
                if verdict:
                    return Address(entry.owner, entry.value.decode(errors="replace"))
                waited_s = now() - seen_at.setdefault(entry.owner, now())
                if verdict is None and waited_s < BETTER_OWNER_WAIT_S:
                    pause_s = BETTER_OWNER_WAIT_S - waited_s
                    break
            await self._changed.wait(pause_s)

    def _judge(self, peer: Peer, name: str, generation: int) -> bool | None:
        """Whether the peer may own the name; None while there is no link that would prove its role."""
        if peer.superseded:
            return False
        if peer.link is None:
            self._reach(peer)
            return None
        rightful = self._may_own(name, peer.role) and generation <= peer.generation
        if not rightful and (peer.node_id, name) not in self._liars:
            self._liars.add((peer.node_id, name))
            self.counts["false-name"] += 1
            _log.warning("%s claims the name %s without the right to it", peer.name, name)
        return rightful
