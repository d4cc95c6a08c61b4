"""The relay's part in punching a hole: see from where both sides come, judge whether that foretells anything, and tell
both to start together. It carries no byte of theirs."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import dataclass, field

from ppsmoke.cluster.handshake import LinkKind, Preamble
from ppsmoke.cluster.paths import Mapping, start_delays_us, why_no_hole
from ppsmoke.cluster.peer import Peer
from ppsmoke.cluster.punch import DEADLINE_S
from ppsmoke.cluster.raw_sockets import RawSocket
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.signals import TOKEN_BYTES, Mapped, NoPunch, PunchAsk, PunchAt
from ppsmoke.cluster.signals import Rendezvous as RendezvousAt
from ppsmoke.cluster.sockets import LinkMaker, Listener
from ppsmoke.errors import DeadlineExceeded, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap

PROBES_S = 10.0  # both sides' probes must be in by then
MAX_ATTEMPTS = 32
MAX_HELD = 4  # probes of one attempt that are kept open


@dataclass(eq=False)
class _Attempt:
    nonce: bytes
    asker: Peer
    other: Peer
    seen: dict[tuple[str, bool], tuple[str, int]] = field(default_factory=dict)  # by node, at the second port or not
    mapped: dict[str, asyncio.Future[Mapped]] = field(default_factory=dict)
    held: list[socket.socket] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def both(self) -> tuple[tuple[Peer, Peer], tuple[Peer, Peer]]:
        """Each side with its peer."""
        return (self.asker, self.other), (self.other, self.asker)

    def mapping(self, node_id: str) -> Mapping | None:
        """None if its probe did not come."""
        first = self.seen.get((node_id, False))
        if first is None:
            return None
        return Mapping(self.mapped[node_id].result().local_port, first, self.seen.get((node_id, True)))


class Rendezvous:
    def __init__(self, roster: Roster, maker: LinkMaker, *, host: str) -> None:
        self.counts: Counter[str] = Counter()  # attempts, hopeless, arranged, probes, repeated-probe
        self._roster = roster
        self._maker = maker
        self._host = host
        self._second: Listener | None = None
        self._attempts: dict[bytes, _Attempt] = {}

    async def close(self) -> None:
        await cancel_and_reap(*(attempt.task for attempt in self._attempts.values() if attempt.task is not None))
        if self._second is not None:
            await self._second.close()

    def on_ask(self, asker: Peer, signal: PunchAsk) -> None:
        other = self._roster.peers.get(signal.to)
        reason = self._why_not(asker, other)
        if reason:
            self._roster.tell(asker.node_id, NoPunch(signal.to, reason, for_good=False))
            return
        attempt = _Attempt(self._maker.machine.token(TOKEN_BYTES), asker, other)
        loop = asyncio.get_running_loop()
        attempt.mapped = {peer.node_id: loop.create_future() for peer in (asker, other)}
        self._attempts[attempt.nonce] = attempt
        self.counts["attempts"] += 1
        attempt.task = asyncio.ensure_future(self._arrange(attempt))
        attempt.task.set_name(f"hole between {asker.name} and {other.name}")

    async def on_probe(self, raw: RawSocket, preamble: Preamble) -> None:
        """Somebody asks as whom we see it. What belongs to an attempt is kept open: a NAT forgets what is closed."""
        self.counts["probes"] += 1
        try:
            observed = await self._maker.answer_probe(raw, preamble)
        except OSError:
            return
        attempt = self._attempts.get(preamble.nonce)
        if attempt is not None and preamble.source in attempt.mapped and len(attempt.held) < MAX_HELD:
            at_second = self._second is not None and raw.socket.getsockname()[1] == self._second.port
            if (preamble.source, at_second) in attempt.seen:  # somebody has overheard its preamble, and comes later
                self.counts["repeated-probe"] += 1
                return
            attempt.seen[preamble.source, at_second] = (observed.host, observed.port)
            attempt.held.append(raw.hand_over())

    def on_mapped(self, peer: Peer, mapped: Mapped) -> None:
        attempt = self._attempts.get(mapped.attempt)
        answer = attempt.mapped.get(peer.node_id) if attempt is not None else None
        if answer is not None and not answer.done():
            answer.set_result(mapped)

    def _why_not(self, asker: Peer, other: Peer | None) -> str:
        if other is None or other is asker or other.link is None or asker.link is None:
            return "the relay has no link to it"
        for peer in (asker, other):
            if peer.link.kind is not LinkKind.DIRECT or peer.link.dialled:
                return f"{peer.name} does not dial the relay, so nobody sees how its NAT maps it"
        if len(self._attempts) >= MAX_ATTEMPTS:
            return "the relay arranges too many holes at once"
        ids = {asker.node_id, other.node_id}
        if any(set(attempt.mapped) == ids for attempt in self._attempts.values()):
            return "the relay is at it already"
        return ""

    async def _arrange(self, attempt: _Attempt) -> None:
        try:
            second_port = self._second_port()
            for peer, other in attempt.both:
                self._roster.tell(peer.node_id, RendezvousAt(attempt.nonce, other.node_id, second_port))
            reason, for_good = await self._judge(attempt)
            if reason:
                self.counts["hopeless"] += 1
                for peer, other in attempt.both:
                    self._roster.tell(peer.node_id, NoPunch(other.node_id, reason, for_good))
                return
            self.counts["arranged"] += 1
            self._start_both(attempt)
            await asyncio.sleep(DEADLINE_S)  # the probes' connections hold the mappings meanwhile
        finally:
            del self._attempts[attempt.nonce]
            for sock in attempt.held:
                sock.close()

    async def _judge(self, attempt: _Attempt) -> tuple[str, bool]:
        """Why there can be no hole, "" if there can, and whether that is for good."""
        deadline = Deadline.after(PROBES_S)
        for peer, _ in attempt.both:
            try:
                mapped = await deadline.wait(attempt.mapped[peer.node_id], doing="probing")
            except DeadlineExceeded:
                return f"{peer.name} did not probe the relay within {PROBES_S:g} s", False
            mapping = attempt.mapping(peer.node_id)
            if mapping is None:
                return f"{peer.name}: {mapped.cause or 'its probe did not reach the relay'}", False
            if reason := why_no_hole(peer.name, mapping):
                return reason, True
        return "", False

    def _start_both(self, attempt: _Attempt) -> None:
        mapped = [attempt.mapped[peer.node_id].result() for peer, _ in attempt.both]
        delays = start_delays_us(*(one.rtt_us for one in mapped))
        seen = [attempt.seen[peer.node_id, False] for peer, _ in attempt.both]
        same_address = seen[0][0] == seen[1][0]
        for (peer, other), delay_us, theirs, public in zip(attempt.both, delays, mapped[::-1], seen[::-1], strict=True):
            # Behind one address: few routers lead their own public address back in (hairpin).
            targets = (*theirs.hosts, public) if same_address else (public,)
            targets = tuple(dict.fromkeys(targets))
            self._roster.tell(peer.node_id, PunchAt(attempt.nonce, other.node_id, delay_us, targets))

    def _second_port(self) -> int:
        """A second listener, so that two destinations show whether a NAT treats them alike; 0 if there can be none."""
        if self._second is None:
            try:
                self._second = Listener(self._host, 0, self._maker)
            except LinkError:
                return 0
            self._second.start()
        return self._second.port
