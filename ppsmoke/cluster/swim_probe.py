"""The failure detector: who is pinged when, how long an answer may take, who helps, how well we are ourselves. Pure.

The members share one rotation instead of shuffling each for itself: in round r the member at place i of the sorted
ids pings the one r + 1 places further. Rounds travel on pings (like Lamport's clock) and pull late members along, so
each member is pinged once a period by somebody, and a crash is noticed after half a period on average, one at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ppsmoke.cluster.swim_effects import Effects
from ppsmoke.cluster.swim_members import Member, MemberTable
from ppsmoke.cluster.swim_packets import Body, ForwardedAck, Nack, Ping, PingRequest
from ppsmoke.cluster.swim_paths import Path
from ppsmoke.cluster.swim_state import MILLISECOND, State, UdpBlocked, UdpRestored, Via

MAX_RELAYED = 256  # pings on behalf of others that are open at once
MAX_WAIT_MS = 10_000  # of a helper before it says that the target has not answered
_SEQ_MASK = (1 << 32) - 1


class SendBody(Protocol):
    def __call__(self, to: str, body: Body, via: Via | None = None) -> None: ...


@dataclass
class _Probe:
    target: str
    epoch: int
    started: int  # own time
    sent: dict[Via, int] = field(default_factory=dict)
    answered: bool = False
    helpers: int = 0
    nacks: int = 0


@dataclass
class _Relayed:
    requester: str
    seq: int
    target: str


class Prober:
    """Pings one member a period; tells suspect(member) of those that gave no sign of life in any way."""

    def __init__(
        self,
        effects: Effects,
        table: MemberTable,
        *,
        send: SendBody,
        path: Callable[[str], Path],
        digest: Callable[[], bytes],
    ) -> None:
        self._effects = effects
        self._config = effects.config
        self._table = table
        self._send = send
        self._path = path
        self._digest = digest
        self._seq = 0
        self._round = 0  # of our latest tick
        self._peer_round: int | None = None  # a later one that a peer is in
        self._turns: dict[str, int] = {}  # our tick in which each member was last pinged in its turn
        self._ticks = 0
        self._ticked_at = 0
        self._tick_timer: int | None = None
        self._probes: dict[int, _Probe] = {}
        self._relayed: dict[int, _Relayed] = {}
        self.health = 0

    def start(self) -> None:
        self._tick_timer = self._effects.arm(self._effects.rng.randrange(self._config.probe_period), self._tick)

    def feel(self, change: int) -> None:
        """Local health: failures that may be ours make us slower to judge."""
        self.health = max(0, min(self._config.health_max, self.health + change))

    def saw_round(self, number: int) -> None:
        """A peer is in this round already: ours follows at once, unless it would be our second within 3/4 of a period
        (a liar cannot make us flood), or we are not well and slow on purpose."""
        current = self._round if self._peer_round is None else self._peer_round
        if not 0 < (number - current) & _SEQ_MASK < _SEQ_MASK // 2:
            return
        self._peer_round = number
        if self.health == 0 and self._tick_timer is not None:
            self._effects.cancel(self._tick_timer)
            earliest = self._ticked_at + self._config.probe_period * 3 // 4
            self._tick_timer = self._effects.arm(earliest - self._effects.now, self._tick)

    def probe(self, target: str) -> None:
        """Ping it now, whoever's turn it is."""
        member = self._table.get(target)
        if member is None or not member.lives:
            return
        path, now = self._path(target), self._effects.now
        seq = self._next_seq()
        probe = self._probes[seq] = _Probe(target, member.epoch, now)
        if self._config.udp:
            self._ping(probe, seq, "udp")
            path.pinged_by_udp(now)
        if path.link and (path.udp_blocked or not self._config.udp):
            self._ping(probe, seq, "link")
        timeout = path.timeout(self._config)
        self._effects.arm(timeout, self._late, seq, timeout)
        period = self._config.probe_period * (self.health + 1)
        failing = max(period, self._config.verdict_timeouts * timeout)
        self._effects.arm(failing + self._config.doubt, self._verdict, seq)

    def ping_gone(self, member: Member) -> None:
        """So that the dead learns of its death and refutes it, and who has left and is back in a new life, which knows
        nobody, learns of us; nothing is concluded from silence."""
        self._send(member.node_id, Ping(self._next_seq(), self._round, self._digest()))

    def on_ack(self, sender: str, seq: int, via: Via) -> None:
        if relayed := self._relayed.get(seq):
            if relayed.target == sender:
                del self._relayed[seq]
                self._send(relayed.requester, ForwardedAck(relayed.seq, sender))
            return
        probe = self._probes.get(seq)
        if probe is None or probe.target != sender:
            return
        path, now = self._path(sender), self._effects.now
        if via in probe.sent:
            path.sample(now - probe.sent.pop(via))
        if via == "udp":
            path.acked_by_udp(now)
            if path.udp_blocked:
                path.udp_blocked = False
                self._effects.emit(UdpRestored(sender))
        elif (direction := path.udp_lost(now, self._config)) and not path.udp_blocked and self._config.udp:
            path.udp_blocked = True
            self._effects.emit(UdpBlocked(sender, direction))
        probe.answered = True

    def on_forwarded_ack(self, target: str, seq: int) -> bool:
        """Whether this is what answers the probe: others reach the target, and we may not."""
        probe = self._probes.get(seq)
        if probe is None or probe.target != target or probe.answered:
            return False
        probe.answered = True
        return True

    def on_nack(self, seq: int) -> None:
        if probe := self._probes.get(seq):
            probe.nacks = min(probe.helpers, probe.nacks + 1)

    def on_ping_request(self, requester: str, request: PingRequest) -> None:
        if request.target == self._table.node_id:
            self._send(requester, ForwardedAck(request.seq, request.target))
            return
        if self._table.get(request.target) is None or len(self._relayed) >= MAX_RELAYED:
            self._send(requester, Nack(request.seq))
            return
        seq = self._next_seq()
        self._relayed[seq] = _Relayed(requester, request.seq, request.target)
        self._send(request.target, Ping(seq, self._round, self._digest()))
        self._effects.arm(min(request.wait_ms, MAX_WAIT_MS) * MILLISECOND, self._no_answer_yet, seq)

    def _tick(self) -> None:
        self._ticked_at = self._effects.now
        self._tick_timer = self._effects.arm(self._config.probe_period * (self.health + 1), self._tick)
        self._ticks += 1
        self._round = (self._round + 1) & _SEQ_MASK if self._peer_round is None else self._peer_round
        self._peer_round = None
        live = self._table.live()
        if not live:
            self.feel(-1)
            return
        place = sum(node_id < self._table.node_id for node_id in live)
        # The ring is `live` with us at `place`; the one r + 1 places further, r in 0 .. n - 2, is never ourselves.
        target = live[(place + self._round % len(live)) % len(live)]
        self.probe(self._take_turn(live, target))

    def _take_turn(self, live: list[str], target: str) -> str:
        """The target; but whoever was passed over for two rotations (a liar can make rounds jump) comes first."""
        self._turns = {node_id: self._turns.get(node_id, self._ticks) for node_id in live}
        oldest = min(live, key=lambda node_id: (self._turns[node_id], node_id))
        if self._ticks - self._turns[oldest] > 2 * len(live):
            target = oldest
        self._turns[target] = self._ticks
        return target

    def _ping(self, probe: _Probe, seq: int, via: Via) -> None:
        probe.sent[via] = self._effects.now
        self._send(probe.target, Ping(seq, self._round, self._digest()), via)

    def _late(self, seq: int, timeout: int) -> None:
        """No direct answer in time: helpers are asked, and the link is tried, both at once."""
        probe = self._probes[seq]
        if probe.answered:
            return
        helpers = [m.node_id for m in self._table.in_state(State.ALIVE) if m.node_id != probe.target]
        helpers = self._effects.rng.sample(helpers, min(len(helpers), self._config.indirect_probes))
        probe.helpers = len(helpers)
        for helper in helpers:
            self._send(helper, PingRequest(seq, probe.target, timeout * 4 // 5 // MILLISECOND))
        if self._path(probe.target).link and "link" not in probe.sent:
            self._ping(probe, seq, "link")

    def _verdict(self, seq: int) -> None:
        probe = self._probes[seq]
        if not probe.answered and (grace := self._effects.grace_left()):
            self._effects.arm(grace, self._verdict, seq)
            return
        del self._probes[seq]
        if probe.answered:
            self.feel(-1)
            return
        member = self._table.get(probe.target)
        if member is None or not member.lives or member.epoch != probe.epoch:
            return
        if member.heard is not None and member.heard >= probe.started:
            return  # passive life: it spoke meanwhile, only not to answer this
        self.feel(probe.helpers - probe.nacks if probe.helpers else 1)
        self._table.suspect(member)

    def _no_answer_yet(self, seq: int) -> None:
        if relayed := self._relayed.get(seq):
            self._send(relayed.requester, Nack(relayed.seq))
            self._effects.arm(MAX_WAIT_MS * MILLISECOND, self._relayed.pop, seq, None)

    def _next_seq(self) -> int:
        self._seq = (self._seq + 1) & _SEQ_MASK
        return self._seq
