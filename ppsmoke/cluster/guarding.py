"""When a peer counts as lost to a run: no link for too long, silence and a death, a goodbye, a new life."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NoReturn

from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.roster import Roster
from ppsmoke.errors import LinkLost


class Guard:
    """is_dead(node_id): whether SWIM says so."""

    def __init__(
        self,
        roster: Roster,
        changed: Signal,
        *,
        grace_s: float,
        is_dead: Callable[[str], bool],
    ) -> None:
        self._roster = roster
        self._changed = changed
        self._grace_s = grace_s
        self._is_dead = is_dead

    async def watch(self, peers: Collection[str]) -> NoReturn:
        """Raises LinkLost for the first of these node ids that is lost."""
        lives = {node_id: self._roster.peer(node_id).epoch for node_id in peers}
        while True:
            soonest_s: float | None = None
            for node_id, life in lives.items():
                peer = self._roster.peer(node_id)
                if life and peer.epoch != life:
                    raise peer.lost(f"{peer.name} has restarted: what it knew is gone")
                lost_in_s = self._lost_in_s(peer)
                if lost_in_s is not None:
                    if lost_in_s <= 0:
                        raise self._loss(self._to_blame(peer, lives))
                    soonest_s = lost_in_s if soonest_s is None else min(soonest_s, lost_in_s)
            await self._changed.wait(soonest_s)

    def _lost_in_s(self, peer: Peer) -> float | None:
        """How long until it counts as lost; 0 or less: it is. None: nothing speaks for that."""
        without_link_s = peer.lost_in_s()
        if not self._is_dead(peer.node_id):
            return without_link_s
        # SWIM alone buries frozen hosts falsely: its word counts when all else is as silent, with a link or without.
        silent_s = self._grace_s - peer.silent_s
        return silent_s if without_link_s is None else min(silent_s, without_link_s)

    def _to_blame(self, lost: Peer, guarded: Collection[str]) -> Peer:
        """Itself, or the relay that it was reached through, if that is out of reach as well."""
        relay = self._roster.peers.get(lost.via)
        if relay is None or lost.left is not None or relay.node_id not in guarded:
            return lost
        return relay if relay.link is None or self._is_dead(relay.node_id) else lost

    def _loss(self, peer: Peer) -> LinkLost:
        if peer.left is not None or not self._is_dead(peer.node_id):
            return peer.lost_error()
        why = f" ({peer.last_error.cause})" if peer.last_error is not None else ""
        return peer.lost(f"{peer.name}: no byte for {peer.silent_s:.0f} s, and declared dead{why}")
