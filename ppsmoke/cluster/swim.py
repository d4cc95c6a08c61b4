"""SWIM membership with gossiped names, as a pure core: bytes, link events and timers in, commands out.

It knows no clock, no socket and no chance but the generator it is given: the same inputs give the same bytes. What it
decides: who is alive, suspected, dead or gone, and who says that it owns which name. What it never decides: what any
of that means for a run. After SWIM (Das, Gupta, Motivala 2002) and Lifeguard (arXiv 1707.00788).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

from ppsmoke.cluster.names import MAX_VERSION, NameEntry, NameRegistry
from ppsmoke.cluster.swim_effects import Effects
from ppsmoke.cluster.swim_gossip import GossipQueue
from ppsmoke.cluster.swim_members import Member, MemberTable
from ppsmoke.cluster.swim_packets import (
    MAX_META_BYTES,
    Ack,
    ForwardedAck,
    Gossip,
    MemberUpdate,
    Nack,
    Packet,
    PacketError,
    Ping,
    PingRequest,
    Stale,
    Sync,
    decode,
    encode_update,
)
from ppsmoke.cluster.swim_paths import Path
from ppsmoke.cluster.swim_probe import Prober
from ppsmoke.cluster.swim_spread import Spreader
from ppsmoke.cluster.swim_state import (
    Command,
    Config,
    EpochRaised,
    NameChanged,
    NameLost,
    Refuted,
    State,
    Via,
)

MAX_INCARNATION = (1 << 32) - 1
MAX_EPOCH = 1 << 63  # far beyond any clock, and a century of lies before the end of its 64 bits
MAX_PATHS = 1024  # peers whose path is remembered; members are far fewer


class Core:
    """One node's view. Each on_... and each verb returns what is to be done, in order."""

    def __init__(self, config: Config, node_id: str, epoch: int, rng: Random, *, meta: bytes = b"") -> None:
        self.config = config
        self.node_id = node_id
        self.epoch = epoch
        self.incarnation = 0
        self.meta = _checked_meta(meta)
        self.counts: Counter[str] = Counter()
        self.names = NameRegistry()
        self._effects = Effects(config, rng)
        self._paths: dict[str, Path] = {}
        self._hearing = ""  # whose packet is being read, unless it is a whole view
        self._leaving = False
        gossip = GossipQueue()
        self.table = MemberTable(node_id, epoch, self._effects, gossip, self._accused, self._revived, self.counts)
        self._spreader = Spreader(self._effects, self.table, self.names, gossip, self._myself(), path=self.path)
        self._prober = Prober(
            self._effects, self.table, send=self._spreader.send, path=self.path, digest=self._spreader.digest
        )

    # Inputs

    def start(self, now: int) -> list[Command]:
        self._effects.begin(now)
        self._prober.start()
        self._spreader.start()
        self._effects.arm(self._effects.rng.randrange(self.config.dead_ping_period), self._dead_tick)
        return self._done()

    def join(self, now: int, seeds: Iterable[str]) -> list[Command]:
        """Ask these for all they know, until the first member is there."""
        self._effects.begin(now)
        self._spreader.join(seeds)
        return self._done()

    def on_timer(self, now: int, token: int) -> list[Command]:
        if frozen := self._effects.fire(now, token):
            self._woke(frozen)
        return self._done()

    def on_datagram(self, now: int, sender: str, epoch: int, payload: bytes, *, via: Via) -> list[Command]:
        """A packet whose sender and life the seal or the link vouches for."""
        self._effects.begin(now)
        if sender == self.node_id:
            self.counts["own-echo"] += 1
            return self._done()
        try:
            packet = decode(payload)
        except PacketError as error:
            self.counts[error.reason] += 1
            return self._done()
        self._receive(sender, epoch, packet, via)
        return self._done()

    def on_link(self, now: int, peer: str, *, up: bool, epoch: int = 0, meta: bytes = b"") -> list[Command]:
        """A link to the peer stands, in the given life; or it is gone, which proves nothing but is worth a ping."""
        self._effects.begin(now)
        self.path(peer).link = up
        if not up:
            self._prober.probe(peer)
        elif peer != self.node_id:
            self.table.apply(MemberUpdate(State.ALIVE, peer, epoch, 0, meta=meta[:MAX_META_BYTES]))
            if (member := self.table.get(peer)) and member.epoch == epoch:
                self.table.heard(peer)
            self._spreader.sync_with(peer)
        return self._done()

    def note_life(self, now: int, peer: str) -> list[Command]:
        """A frame of the peer came over its link."""
        self._effects.begin(now)
        self.table.heard(peer)
        return self._done()

    def register(
        self, now: int, name: str, value: bytes, *, generation: int = 0, deleted: bool = False
    ) -> list[Command]:
        """Say that we own the name. Raises ValueError if it does not fit."""
        self._effects.begin(now)
        entry = self.names.write(
            name, owner=self.node_id, epoch=self.epoch, value=value, generation=generation, deleted=deleted
        )
        self._tell_name(entry)
        return self._done()

    def set_meta(self, now: int, meta: bytes) -> list[Command]:
        """What we tell others of ourselves has changed."""
        self._effects.begin(now)
        self.meta = _checked_meta(meta)
        self._announce(self.incarnation + 1)
        return self._done()

    def leave(self, now: int) -> list[Command]:
        """Tell everybody; pings are still answered, so linger for two seconds before going."""
        self._effects.begin(now)
        self._leaving = True
        self._effects.cancel_all()
        self._spreader.stop()
        self._spreader.tell_of_us(self._myself())
        for peer in self.table.live():
            self._spreader.send(peer, Gossip())
        return self._done()

    # Questions

    def lookup(self, name: str) -> list[NameEntry]:
        """Who owns the name, the best first: owners that are alive or suspected, in the life that registered it."""
        return self.names.lookup(name, lives=self._lives)

    @property
    def health(self) -> int:
        """Lifeguard's local health: 0 is well, config.health_max is the worst."""
        return self._prober.health

    @property
    def own_time(self) -> int:
        """Microseconds, of the latest input, on the core's own clock (see swim_effects.py)."""
        return self._effects.now

    def path(self, peer: str) -> Path:
        """What is known of the ways to a peer."""
        path = self._paths.get(peer)
        if path is None:
            if len(self._paths) >= MAX_PATHS:
                del self._paths[next(iter(self._paths))]  # the longest known; a path is learned again in seconds
            path = self._paths[peer] = Path()
        return path

    def _done(self) -> list[Command]:
        self._spreader.arm_burst()
        return self._effects.take()

    def _dead_tick(self) -> None:
        self._effects.arm(self.config.dead_ping_period, self._dead_tick)
        for forgotten in self.table.forget_old():
            self.names.forget(forgotten)
            self._spreader.forget(forgotten)
        for state in (State.DEAD, State.LEFT):
            if gone := self.table.in_state(state):
                self._prober.ping_gone(self._effects.rng.choice(gone))

    # Receiving

    def _receive(self, sender: str, epoch: int, packet: Packet, via: Via) -> None:
        member = self.table.get(sender)
        if member is not None and epoch < member.epoch:
            self.counts["former-life"] += 1
            if self._may_answer(sender):
                self._spreader.send(sender, Stale(epoch, member.epoch), via)
            return
        synced = isinstance(packet.body, Sync)
        self._hearing = "" if synced else sender
        for update in packet.updates:
            if isinstance(update, NameEntry):
                self._hear_name(update)
            else:
                self.table.apply(update, synced=synced)
        if packet.updates:
            member = self.table.get(sender)  # it may be known only now
        self._mark_life(sender, member, epoch, packet, via)
        match packet.body:
            case Ping(seq, round, digest):
                self._prober.saw_round(round)
                self._spreader.send(sender, Ack(seq, self._spreader.digest()), via)
                self._spreader.compare(sender, digest)
            case Ack(seq, digest):
                self._prober.on_ack(sender, seq, via)
                self._spreader.compare(sender, digest)
            case PingRequest() as request:
                self._prober.on_ping_request(sender, request)
            case Nack(seq):
                self._prober.on_nack(seq)
            case ForwardedAck(seq, target):
                if self._prober.on_forwarded_ack(target, seq):
                    self.table.accuse_again(target)
            case Sync(seq, wants_reply):
                if wants_reply:
                    self._spreader.reply(sender, seq)
            case Stale(seen, known):
                if seen == self.epoch and known > seen:
                    self._raise_epoch(known)
        self._answer_stranger(sender, member, epoch, packet)
        self._hearing = ""

    def _mark_life(self, sender: str, member: Member | None, epoch: int, packet: Packet, via: Via) -> None:
        path = self.path(sender)
        path.hears_us = packet.hears_udp
        if via == "udp":
            path.udp_heard = self._effects.now
        if member is not None and member.epoch == epoch:
            member.heard = self._effects.now

    def _answer_stranger(self, sender: str, member: Member | None, epoch: int, packet: Packet) -> None:
        """Someone we do not know, or know from a former life, is asked; who does not know that it is accused is told
        (in our ack, if it pinged)."""
        if member is None or member.epoch < epoch:
            if not (isinstance(packet.body, Sync) and packet.body.wants_reply) and self._may_answer(sender):
                self._spreader.sync_with(sender)
        elif member.state in (State.SUSPECT, State.DEAD) and packet.incarnation <= member.incarnation:
            if not isinstance(packet.body, Ping) and self._may_answer(sender):
                self._spreader.send(sender, Gossip())

    def _may_answer(self, sender: str) -> bool:
        """Unasked answers are rationed: two that talk past each other must not flood."""
        path, now = self.path(sender), self._effects.now
        if path.answered_at is not None and now - path.answered_at < self.config.answer_period:
            return False
        path.answered_at = now
        return True

    # What is said of us, and what we say

    def _accused(self, update: MemberUpdate) -> None:
        if self._leaving or update.epoch < self.epoch:
            return  # of a former life
        if update.epoch > self.epoch:
            if update.epoch <= self.epoch + self.config.epoch_ahead_max:
                self._raise_epoch(update.epoch)
            else:
                self.counts["implausible-epoch"] += 1
        elif update.incarnation > self.incarnation or (
            update.incarnation == self.incarnation and update.state is not State.ALIVE
        ):
            self._announce(update.incarnation + 1)
            self.table.disproved()
            if update.state is State.SUSPECT:
                self._prober.feel(1)
            self._effects.emit(Refuted(self.incarnation, update.accuser))

    def _announce(self, incarnation: int) -> None:
        if incarnation > MAX_INCARNATION:
            self._raise_epoch(self.epoch)
            return
        self.incarnation = incarnation
        self._spreader.tell_of_us(self._myself())

    def _raise_epoch(self, above: int) -> None:
        """Go on in a life after `above`: its names are written anew."""
        if above > min(MAX_EPOCH, self.epoch + self.config.epoch_ahead_max):
            self.counts["implausible-epoch"] += 1
            return
        self.epoch = self.table.epoch = above + 1
        self._effects.emit(EpochRaised(self.epoch))
        self._announce(0)
        for old in self.names.of(self.node_id):
            self._tell_name(self.names.write(
                old.name, owner=self.node_id, epoch=self.epoch, value=old.value,
                generation=old.generation, deleted=old.deleted,
            ))  # fmt: skip

    def _woke(self, frozen: int) -> None:
        """We stood still and are probably accused: everybody hears at once that we live."""
        self._prober.feel(1)
        self.table.disproved()
        if self._leaving:
            return
        self._announce(self.incarnation + 1)
        self._effects.emit(Refuted(self.incarnation, ""))
        for peer in self.table.live():
            self._spreader.send(peer, Gossip())

    def _myself(self) -> MemberUpdate:
        state = State.LEFT if self._leaving else State.ALIVE
        return MemberUpdate(state, self.node_id, self.epoch, self.incarnation, meta=self.meta)

    def _revived(self, member: Member) -> None:
        for entry in self.names.of(member.node_id):
            self._spreader.tell(("name", entry.owner, entry.name), encode_update(entry))
        self._spreader.forget(member.node_id)
        if member.node_id == self._hearing and not self._leaving:
            self._spreader.sync_with(member.node_id)  # it was gone: it may have missed anything

    # Names

    def _hear_name(self, entry: NameEntry) -> None:
        if entry.owner == self.node_id:
            self._hear_own_name(entry)
            return
        if entry.owner_epoch > self.epoch + self.config.epoch_ahead_max:
            self.counts["implausible-epoch"] += 1
        elif self.names.hear(entry):
            self._tell_name(entry)
            mine = self.names.get(entry.name, self.node_id)
            if mine is not None and not mine.deleted and not entry.deleted and entry.rank() > mine.rank():
                self._effects.emit(NameLost(entry.name, entry.owner, entry.generation))

    def _hear_own_name(self, entry: NameEntry) -> None:
        """Someone tells us what we are said to own: ours is written above it if it would win."""
        mine = self.names.get(entry.name, self.node_id)
        if entry.owner_epoch != self.epoch or mine is None or not entry.newer_than(mine):
            return
        if entry.version >= MAX_VERSION:
            self._raise_epoch(self.epoch)
        else:
            self.names.hear(mine._replace(version=entry.version + 1))
            self._tell_name(mine._replace(version=entry.version + 1))

    def _tell_name(self, entry: NameEntry) -> None:
        self._spreader.tell(("name", entry.owner, entry.name), encode_update(entry))
        self._effects.emit(NameChanged(entry.name))

    def _lives(self, owner: str, epoch: int) -> bool:
        if owner == self.node_id:
            return epoch == self.epoch
        member = self.table.get(owner)
        return member is not None and member.lives and member.epoch == epoch


def _checked_meta(meta: bytes) -> bytes:
    if len(meta) > MAX_META_BYTES:
        raise ValueError(f"meta of {len(meta)} bytes, at most {MAX_META_BYTES} fit into a datagram")
    return meta
