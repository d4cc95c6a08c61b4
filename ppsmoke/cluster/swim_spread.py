"""How knowledge spreads: piggybacked on every packet, by bursts of gossip while there is news, and by exchanging whole
views (push/pull) now and then, on joining, and when two digests differ for long. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from ppsmoke.cluster.names import NameRegistry
from ppsmoke.cluster.swim_effects import Effects
from ppsmoke.cluster.swim_gossip import GossipQueue, Key
from ppsmoke.cluster.swim_members import MemberTable
from ppsmoke.cluster.swim_packets import DIGEST_BYTES, Body, Gossip, MemberUpdate, Sync, encode_head, encode_update
from ppsmoke.cluster.swim_paths import Path
from ppsmoke.cluster.swim_state import State, Via, retransmissions

_BURST_DELAY = 1000  # microseconds: what one input brings is told together
_REPLY_PERIOD = 200_000  # microseconds: a peer gets our whole view no more often


class Spreader:
    """Every packet of this node leaves here, so that each carries as much news as fits."""

    def __init__(
        self,
        effects: Effects,
        table: MemberTable,
        names: NameRegistry,
        gossip: GossipQueue,
        myself: MemberUpdate,
        *,
        path: Callable[[str], Path],
    ) -> None:
        """myself: what is told of this node; tell_of_us brings it up to date."""
        self._effects = effects
        self._config = effects.config
        self._table = table
        self._names = names
        self._gossip = gossip
        self._myself = myself
        self._path = path
        self._gossip_timer: int | None = None
        self._gossiped_at = -self._config.gossip_period
        self._seeds: list[str] = []
        self._sync_seq = 0
        self._replied: dict[str, tuple[int, int]] = {}  # seq and time of each member's last sync that got its reply
        self._differs: dict[str, int] = {}  # since when (own time) a member's digest has not been ours
        self._agreed: dict[str, int] = {}  # when (own time) a member's digest was ours
        self._digest_of: tuple[tuple[object, ...], bytes] = ((), bytes(DIGEST_BYTES))

    def start(self) -> None:
        self._effects.arm(self._effects.rng.randrange(self._config.sync_period), self._sync_tick)

    def join(self, seeds: Iterable[str]) -> None:
        self._seeds = [seed for seed in seeds if seed != self._table.node_id]
        self._join_tick()

    def send(self, to: str, body: Body, via: Via | None = None) -> None:
        """What we think of the receiver goes first, if it is accused; then news while there is room."""
        path, now = self._path(to), self._effects.now
        payload = encode_head(self._myself.incarnation, path.hears_udp(now, self._config), body)
        member = self._table.get(to)
        if member is not None and member.state in (State.SUSPECT, State.DEAD):
            payload += encode_update(self._table.accusation(member))
        payload += self._gossip.take(self._config.payload_limit - len(payload))
        self._effects.send(to, payload, via or path.via())

    def tell_of_us(self, myself: MemberUpdate) -> None:
        """This is what we are from now on."""
        self._myself = myself
        self.tell(("member", myself.node_id, ""), encode_update(myself))

    def tell(self, key: Key, encoded: bytes) -> None:
        self._gossip.put(key, encoded, retransmissions(self._config, size=self._table.size()))

    def stop(self) -> None:
        """Timers are gone; what is queued from now on is still told, by arm_burst."""
        self._gossip_timer = None
        self._gossip.clear()

    def arm_burst(self) -> None:
        """Called at the end of every input: while there is news, it is told every gossip period."""
        if self._gossip and self._gossip_timer is None:
            delay = max(_BURST_DELAY, self._gossiped_at + self._config.gossip_period - self._effects.now)
            self._gossip_timer = self._effects.arm(delay, self._burst)

    def sync_with(self, peer: str) -> None:
        """Push all we know, and ask for the same."""
        self._sync_seq = (self._sync_seq + 1) & 0xFFFFFFFF
        self._send_view(peer, self._sync_seq, wants_reply=True)

    def reply(self, peer: str, seq: int) -> None:
        """A view in many parts asks in each of them; it gets one reply."""
        last_seq, last_at = self._replied.get(peer, (None, -_REPLY_PERIOD))
        if last_seq != seq and self._effects.now - last_at >= _REPLY_PERIOD:
            self._replied[peer] = seq, self._effects.now
            self._send_view(peer, seq, wants_reply=False)

    def compare(self, peer: str, digest: bytes) -> None:
        """Views differ for a moment whenever something happens; only what lasts is mended."""
        now = self._effects.now
        if digest == self.digest():
            self._differs.pop(peer, None)
            self._agreed[peer] = now
            return
        self._agreed.pop(peer, None)
        if now - self._differs.setdefault(peer, now) > self._config.digest_patience:
            self._differs[peer] = now
            self.sync_with(peer)

    def forget(self, peer: str) -> None:
        self._replied.pop(peer, None)
        self._differs.pop(peer, None)
        self._agreed.pop(peer, None)

    def digest(self) -> bytes:
        """Of the living and their names; whom we buried is not compared, for not all remember it equally long."""
        myself = self._myself
        view = myself, self._table.version, self._names.version
        if view != self._digest_of[0]:
            lines = [(myself.node_id, myself.epoch, myself.incarnation)]
            lines += [(node_id, *self._table.members[node_id].order) for node_id in self._table.live()]
            living = {line[0] for line in lines}
            names = [(e.name, e.owner, e.owner_epoch, e.version) for e in self._names if e.owner in living]
            text = repr((sorted(lines), names)).encode()
            self._digest_of = view, hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
        return self._digest_of[1]

    def _send_view(self, peer: str, seq: int, *, wants_reply: bool) -> None:
        head = encode_head(
            self._myself.incarnation,
            self._path(peer).hears_udp(self._effects.now, self._config),
            Sync(seq, wants_reply),
        )
        updates = [encode_update(self._myself)]
        updates += [
            encode_update(self._table.accusation(self._table.members[node_id]))
            for node_id in sorted(self._table.members)
        ]
        updates += [encode_update(entry) for entry in self._names]
        part = head
        for update in updates:
            if len(part) + len(update) > self._config.payload_limit:
                self._send_part(peer, part)
                part = head
            part += update
        self._send_part(peer, part)

    def _send_part(self, peer: str, part: bytes) -> None:
        self._effects.send(peer, part, "link" if self._path(peer).link else "udp")

    def _sync_tick(self) -> None:
        self._effects.arm(self._config.sync_period, self._sync_tick)
        alive = self._table.in_state(State.ALIVE)
        if not alive:
            return
        peer = self._effects.rng.choice(alive).node_id
        # A digest that was equal within this period has compared the views already, for nothing.
        if self._effects.now - self._agreed.get(peer, -self._config.sync_period) >= self._config.sync_period:
            self.sync_with(peer)

    def _join_tick(self) -> None:
        if self._table.live() or not self._seeds:
            return
        for seed in self._seeds:
            self.sync_with(seed)
        self._effects.arm(self._config.join_period, self._join_tick)

    def _burst(self) -> None:
        self._gossip_timer = None
        self._gossiped_at = self._effects.now
        since = self._effects.now - self._config.dead_gossip
        targets = self._table.live() + [m.node_id for m in self._table.in_state(State.DEAD) if m.since >= since]
        if not targets:
            self._gossip.clear()  # whoever joins gets all of it at once
            return
        for target in self._effects.rng.sample(targets, min(len(targets), self._config.gossip_nodes)):
            if self._gossip:
                self.send(target, Gossip())
