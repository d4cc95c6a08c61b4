"""Who is there: the member table and the rules by which one claim beats another. Pure.

A claim is ordered by (epoch, incarnation, state): a restarted node has a later epoch (its boot time) and wins at once
over whatever was said of its former life; within a life only the member itself raises its incarnation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ppsmoke.cluster.swim_effects import Effects
from ppsmoke.cluster.swim_gossip import GossipQueue
from ppsmoke.cluster.swim_packets import NOBODY, MemberUpdate, encode_update
from ppsmoke.cluster.swim_state import (
    MemberChanged,
    State,
    confirmations_wanted,
    retransmissions,
    suspicion_bounds,
    suspicion_time,
)

_LIVE = (State.ALIVE, State.SUSPECT)


@dataclass
class Suspicion:
    """accusers: each once, the first is whose word started it. size: of the cluster then. started: own time."""

    accusers: list[str]
    started: int
    size: int
    timer: int | None = None


@dataclass
class Member:
    """meta_order: of which (epoch, incarnation) the meta is. heard: own time of its last sign of life to us."""

    node_id: str
    state: State
    epoch: int
    incarnation: int
    since: int
    accuser: str = NOBODY
    meta: bytes = b""
    meta_order: tuple[int, int] = (-1, -1)
    heard: int | None = None
    suspicion: Suspicion | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.incarnation

    @property
    def lives(self) -> bool:
        return self.state in _LIVE


@dataclass
class MemberTable:
    """All other members. accused(update) is called for what is said about us; revived(member) for those who are back
    or new."""

    node_id: str
    epoch: int
    effects: Effects
    gossip: GossipQueue
    accused: Callable[[MemberUpdate], None]
    revived: Callable[[Member], None]
    counts: Counter[str]
    members: dict[str, Member] = field(default_factory=dict)
    version: int = 0  # grows whenever a state, a life or an incarnation changes
    _live: list[str] | None = None
    _disproved_at: int | None = None  # own time of the latest proof that an accusation was wrong, whoever was accused

    def get(self, node_id: str) -> Member | None:
        return self.members.get(node_id)

    def live(self) -> list[str]:
        """Ids of the alive and the suspected, sorted, without us."""
        if self._live is None:
            self._live = sorted(node_id for node_id, member in self.members.items() if member.lives)
        return self._live

    def in_state(self, state: State) -> list[Member]:
        return [self.members[node_id] for node_id in sorted(self.members) if self.members[node_id].state is state]

    def size(self) -> int:
        """Members that count, us included."""
        return len(self.live()) + 1

    def heard(self, node_id: str) -> None:
        """An authenticated sign of life that came straight from the member's present life."""
        if member := self.members.get(node_id):
            member.heard = self.effects.now

    def apply(self, update: MemberUpdate, *, synced: bool = False) -> None:
        """Take a claim for what it is worth. synced: it came with a whole view, where the dead may be long refuted."""
        if update.node_id == self.node_id:
            self.accused(update)
            return
        if update.epoch > self.epoch + self.effects.config.epoch_ahead_max:
            self.counts["implausible-epoch"] += 1
            return
        member = self.members.get(update.node_id)
        if member is None:
            if not self._make_room():
                self.counts["too-many-members"] += 1
                return
        elif update.meta and (update.epoch, update.incarnation) > member.meta_order:
            member.meta, member.meta_order = update.meta, (update.epoch, update.incarnation)
        match update.state:
            case State.ALIVE:
                self._alive(member, update)
            case State.LEFT:
                self._end(member, update)
            case State.DEAD if not synced and not self._heard_lately(member, update):
                self._end(member, update)
            case _:
                self._suspect(member, update)

    def suspect(self, member: Member) -> None:
        """Our own probe of it failed."""
        if member.lives:
            self._suspect(member, MemberUpdate(State.SUSPECT, member.node_id, *member.order, self.node_id))

    def accuse_again(self, node_id: str) -> None:
        """It lives, others reach it, and we do not: whoever does shall tell it what it is accused of, for all that was
        told of that before may have been lost."""
        member = self.members.get(node_id)
        if member is not None and member.state is State.SUSPECT:
            self._tell(self.accusation(member))

    def disproved(self) -> None:
        """Somebody was accused and lives. What made it silent (a host that loads a model, a path that loses much) may
        make others silent too: for a while nobody is judged as soon as otherwise, those under suspicion included."""
        self._disproved_at = self.effects.now

    def accusation(self, member: Member) -> MemberUpdate:
        """What we think of the member, as it should be told."""
        meta = member.meta if member.meta_order == member.order else b""
        return MemberUpdate(member.state, member.node_id, *member.order, member.accuser, meta)

    def forget_old(self) -> list[str]:
        """Drop the dead whose memory is spent; returns their ids."""
        limit = self.effects.now - self.effects.config.dead_memory
        old = [m.node_id for m in self.members.values() if not m.lives and m.since < limit]
        for node_id in sorted(old):
            del self.members[node_id]
            self.version += 1
        return sorted(old)

    def _alive(self, member: Member | None, update: MemberUpdate) -> None:
        if member is not None and (update.epoch, update.incarnation) <= member.order:
            return
        if member is not None and update.epoch == member.epoch and member.state in (State.SUSPECT, State.DEAD):
            self.disproved()
        back = member is None or not member.lives or member.epoch != update.epoch
        member = self._change(member, update)
        self._tell(update)
        if back:
            self.revived(member)

    def _suspect(self, member: Member | None, update: MemberUpdate) -> None:
        order = (update.epoch, update.incarnation)
        update = update._replace(state=State.SUSPECT)
        if member is not None and order == member.order and member.suspicion is not None:
            self._confirm(member, update)
            return
        if member is not None and (order < member.order or (order == member.order and member.state > State.ALIVE)):
            return
        member = self._change(member, update)
        # Whoever accuses has doubted for a while already: that time counts.
        started = self.effects.now - self.effects.config.doubt
        member.suspicion = Suspicion([update.accuser], started, self.size())
        self._await_refutation(member, member.suspicion)
        self._tell(update)

    def _confirm(self, member: Member, update: MemberUpdate) -> None:
        suspicion = member.suspicion
        if suspicion is None or update.accuser in suspicion.accusers:
            return
        if len(suspicion.accusers) > confirmations_wanted(self.effects.config, size=suspicion.size):
            return
        suspicion.accusers.append(update.accuser)
        self._await_refutation(member, suspicion)
        self._tell(update)

    def _await_refutation(self, member: Member, suspicion: Suspicion) -> None:
        self.effects.cancel(suspicion.timer)
        suspicion.timer = self.effects.arm(self._left_to(member, suspicion), self._not_refuted, member)

    def _not_refuted(self, member: Member) -> None:
        suspicion = member.suspicion
        if suspicion is None:
            return
        if self._left_to(member, suspicion) > 0:  # more than when the timer was set
            self._await_refutation(member, suspicion)
            return
        self._end(member, MemberUpdate(State.DEAD, member.node_id, *member.order, self.node_id))

    def _left_to(self, member: Member, suspicion: Suspicion) -> int:
        """How long the accused may still prove that it lives, as it looks now."""
        now, config = self.effects.now, self.effects.config
        patient = self._disproved_at is not None and now - self._disproved_at < config.patience_memory
        least, greatest = suspicion_bounds(config, size=suspicion.size, patient=patient)
        wanted = confirmations_wanted(config, size=suspicion.size)
        ends = suspicion.started + suspicion_time(
            least, greatest, confirmations=len(suspicion.accusers) - 1, wanted=wanted
        )
        if member.heard is not None and member.heard > suspicion.started:
            # It spoke to us after it was accused: it lives, the accusation has only not reached it yet.
            ends = max(ends, member.heard + least)
        return max(ends - now, self.effects.grace_left())

    def _end(self, member: Member | None, update: MemberUpdate) -> None:
        """Dead or left."""
        if member is not None and (update.epoch, update.incarnation, update.state) <= (*member.order, member.state):
            return
        self._change(member, update)
        self._tell(update)

    def _change(self, member: Member | None, update: MemberUpdate) -> Member:
        old = member.state if member else None
        new_life = member is None or member.epoch != update.epoch
        if member is None:
            member = Member(update.node_id, update.state, update.epoch, update.incarnation, self.effects.now)
            self.members[update.node_id] = member
            if update.meta:
                member.meta, member.meta_order = update.meta, member.order
        if member.suspicion is not None:
            self.effects.cancel(member.suspicion.timer)
            member.suspicion = None
        if new_life:
            member.heard = None
        member.state, member.epoch, member.incarnation = update.state, update.epoch, update.incarnation
        member.since, member.accuser = self.effects.now, update.accuser
        self.version += 1
        self.gossip.drop_member(update.node_id)
        if old is not update.state or new_life:
            self._live = None
            self.effects.emit(MemberChanged(member.node_id, old, member.state, *member.order, update.accuser))
        return member

    def _heard_lately(self, member: Member | None, update: MemberUpdate) -> bool:
        if member is None or member.heard is None or (update.epoch, update.incarnation) != member.order:
            return False
        return member.lives and self.effects.now - member.heard < self.effects.config.lately_heard

    def _tell(self, update: MemberUpdate) -> None:
        key = ("member", update.node_id, update.accuser if update.state is State.SUSPECT else "")
        if update.state is State.ALIVE and not update.meta:
            member = self.members[update.node_id]
            update = update._replace(meta=member.meta if member.meta_order == member.order else b"")
        self.gossip.put(key, encode_update(update), retransmissions(self.effects.config, size=self.size()))

    def _make_room(self) -> bool:
        if len(self.members) < self.effects.config.max_members:
            return True
        ended = [member for member in self.members.values() if not member.lives]
        if not ended:
            return False
        del self.members[min(ended, key=lambda member: (member.since, member.node_id)).node_id]
        self.version += 1
        return True
