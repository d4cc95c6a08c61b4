"""Another node as this one sees it: the session with it, the link that carries it now, and how to reach it again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppsmoke.cluster.addresses import Candidate, Delivery, Endpoint
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.frames import Frame, FrameType, encode_frame
from ppsmoke.cluster.handshake import Bye, ByeReason, LinkKind, link_id_of
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.paths import Upgrades, candidates_in_order
from ppsmoke.cluster.session import Session
from ppsmoke.errors import FrameError, LinkError, LinkLost

LINK_GRACE_S = 15.0  # without a link for this long, a peer is lost to a run
ACK_DELAY_S = 0.1  # an ACK waits this long for data that it can travel with
MAX_PAST_LIVES = 16  # that are remembered: what is still on its way from one is late by seconds, not by restarts
GOODBYE_GRACE_S = 1.0  # what a peer that left has sent before is handled first


@dataclass(frozen=True, kw_only=True)
class PeerContext:
    """What a node gives to each of its peers."""

    epoch: int
    window_bytes: int
    link_grace_s: float
    deliver: Callable[[Peer, str, Delivery], None]  # may call hold_acks
    changed: Signal  # links, and room in a window that was full
    flushed: Signal  # a peer has acknowledged all, or has no link any more


class Peer:
    def __init__(self, node_id: str, context: PeerContext) -> None:
        self.node_id = node_id
        self.role = ""  # proven by a certificate; "" until the first link
        self.generation = 0
        self.epoch = 0
        self.past_lives: deque[int] = deque(maxlen=MAX_PAST_LIVES)  # epochs that another has followed
        self.endpoint: Endpoint | None = None  # where somebody told us to dial it
        self.candidates: tuple[Candidate, ...] = ()  # where it says it can be dialled
        self.gossiped: tuple[Candidate, ...] = ()  # and where others say so: may be a lie, costs a dial in vain
        self.link: Link | None = None
        self.last_error: LinkError | None = None  # of the latest attempt to link
        self.refusal: LinkError | None = None  # HELLOs that do not fit: trying again is useless
        self.left: Bye | None = None
        self.superseded = False
        self._alive_epoch = 0  # the life in which membership calls it alive, 0: it does not
        self.news = 0  # rises when there is word of it while it has no link: a relay may have one now
        self._last_link: Link | None = None
        self.upgrades = Upgrades()
        self.path_reason = ""  # of the latest change of the path
        self.session = Session(epoch=context.epoch, window_bytes=context.window_bytes)
        self._context = context
        self._changed = context.changed
        self._now = asyncio.get_running_loop().time
        self._down_since = self._now()
        self._last_heard = self._now()
        self._down_cause = "no link yet"
        self._ack_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Peer {self.name} {'linked' if self.link else 'not linked'}>"

    @property
    def name(self) -> str:
        """For messages: the proven role, else the expected one, else the id."""
        return self.role or (self.endpoint.role if self.endpoint else "") or self.node_id

    @property
    def silent_s(self) -> float:
        """Since the last byte from it."""
        return self._now() - (self.link.last_heard if self.link else self._last_heard)

    @property
    def via(self) -> str:
        """The relay (its node id) of its link, or of the one that it had; "" if there was none."""
        link = self.link or self._last_link
        return link.via if link is not None else ""

    def lost_in_s(self) -> float | None:
        """How long until it counts as lost; 0 or less: it is. None: there is a link."""
        if self.link is not None:
            return None
        grace_s = min(GOODBYE_GRACE_S, self._context.link_grace_s) if self.left else self._context.link_grace_s
        return self._down_since + grace_s - self._now()

    def sought(self) -> None:
        """From now on a link to it is wanted, for the first time. That there was none before is no loss."""
        if self.epoch == 0:
            self._down_since = self._now()

    def lost_error(self) -> LinkLost:
        if self.left:
            return self.lost(f"{self.name} has left: {self.left}")
        return self.lost(f"{self.name}: no link for {self._now() - self._down_since:.0f} s ({self.why_not_linked()})")

    def lost(self, cause: str) -> LinkLost:
        return LinkLost(cause, peer=self.node_id)

    def why_not_linked(self) -> str:
        return self.last_error.cause if self.last_error else self._down_cause

    def stood_still(self, since: float, lag_s: float) -> None:
        """From then on this process stood still for so long, and could not have heard it: that is no silence of its.
        An open link sees to its own."""
        if self.link is None:
            self._down_since += lag_s if self._down_since <= since else 0.0
            self._last_heard += lag_s if self._last_heard <= since else 0.0

    def udp_address(self) -> tuple[str, int] | None:
        """Where it probably hears datagrams: the host at the other end of the link, and the port that we were told."""
        if self.link is None or self.link.kind is not LinkKind.DIRECT:
            return None
        port = self.link.hello.udp_port
        if self.link.dialled and self.endpoint is not None:
            port = self.endpoint.udp_port
        return (self.link.remote_host, port) if port else None

    # --- links

    def attach(self, link: Link) -> Link | None:
        """This link carries the session from now on. The link that it replaces, if any."""
        old, self.link = self.link, link
        self.path_reason = self._why_this_path(old)
        if self.epoch not in (0, link.hello.epoch):
            self.upgrades.restarted()
            self.past_lives.append(self.epoch)
        self.upgrades.linked(link.kind, self._now())
        self.role, self.generation = link.peer.role, link.peer.generation
        self.left = self.last_error = self.refusal = None
        self.candidates = link.hello.candidates or self.candidates
        self.epoch = link.hello.epoch
        self.session.attach(peer_epoch=link.hello.epoch, peer_resume=link.hello.resume)
        self._schedule_ack()
        self.pump()
        self._changed.notify()
        return old

    def detach(self, link: Link, cause: str, bye: Bye | None) -> bool:
        """That link is gone. False if it was no longer the one that carries the session."""
        if link is not self.link:
            return False
        self.link, self._last_link = None, link
        self.upgrades.lost(self._now())
        self._down_since, self._last_heard, self._down_cause = self._now(), link.last_heard, cause
        if bye is not None and bye.reason is ByeReason.LEAVING and self._alive_epoch <= self.epoch:
            self.left = bye
        self._changed.notify()
        self._context.flushed.notify()
        return True

    def on_membership(self, *, alive_epoch: int) -> None:
        """In which life it is alive, 0: in none. Who left may be back without having dialled us."""
        self._alive_epoch = alive_epoch
        if self.left is not None and self.link is None and alive_epoch > self.epoch:
            self.left = None
            self._down_since, self._down_cause = self._now(), "it is back, and not linked yet"

    def candidates_in_order(self) -> list[Candidate]:
        """Where to dial it, the likeliest first."""
        told = self.endpoint.candidate if self.endpoint is not None and self.endpoint.host else None
        return candidates_in_order(told, self.candidates, self.gossiped)

    def _why_this_path(self, old: Link | None) -> str:
        if old is not None:
            return f"was {old.kind.name.lower()}"
        return "the first that worked" if self.epoch == 0 else f"after: {self._down_cause}"

    def leg_closed(self, token: bytes, relay_id: str, cause: str) -> None:
        """The relay says how the leg ended whose link we have, or had a moment ago; of others it says nothing."""
        last = self.link or self._last_link
        if last is not None and last.via == relay_id and last.id == link_id_of(token):
            self._down_cause = cause
            if self.link is not None:
                self.link.abort()

    # --- sending

    async def send(self, mailbox: str, pieces: Sequence[bytes]) -> None:
        """Returns once the message is in the window. Raises LinkLost."""
        life = self.epoch
        while True:
            lost_in_s = self.lost_in_s()
            if self.left is not None or (lost_in_s is not None and lost_in_s <= 0):
                raise self.lost_error()
            if life and self.epoch != life:
                raise self.lost(f"{self.name} has restarted: what it knew is gone")
            if self.epoch and self.session.has_room:
                break
            life = self.epoch
            await self._changed.wait(lost_in_s)
        self.session.offer(mailbox, pieces)
        self.pump()

    def pump(self) -> None:
        """Write what the window holds, as long as the link takes it."""
        link, written = self.link, 0
        while link is not None and not link.paused and link.state == "up":
            chunk = self.session.next_chunk()
            if chunk is None:
                break
            written += len(chunk.payload)
            link.write(
                encode_frame(
                    FrameType.DATA,
                    flags=chunk.flags,
                    sequence=chunk.sequence,
                    payload=chunk.payload,
                    before=self._take_ack(),
                )
            )
        if written and link is not None:
            link.keep_warm(written)

    # --- receiving

    def on_frame(self, frame: Frame) -> None:
        """DATA, ACK or PING. Raises FrameError."""
        if frame.type is FrameType.DATA:
            arrival = self.session.on_chunk(frame)
            if arrival is not None:
                self._context.deliver(self, arrival.mailbox, Delivery(self.node_id, self.role, arrival.payload))
            if self.session.owes_ack_now:
                self._flush_ack()
            else:
                self._schedule_ack()
        elif frame.type is FrameType.ACK:
            had_room = self.session.has_room
            self.session.on_ack(frame.sequence)
            if self.session.has_room and not had_room:
                self._changed.notify()
            if self.session.idle:
                self._context.flushed.notify()
        elif frame.type is FrameType.PING:
            self._flush_ack()
        else:
            raise FrameError(f"a {frame.type.name} frame where none is due")

    def hold_acks(self) -> None:
        """A mailbox is full: acknowledge nothing more, so that the sender's window closes."""
        self.session.acks_held = True

    def release_acks(self) -> None:
        self.session.acks_held = False
        self._flush_ack()

    def _schedule_ack(self) -> None:
        if self._ack_timer is None and self.session.owes_ack:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._flush_ack)

    def _flush_ack(self) -> None:
        data = self._take_ack()
        if data and self.link is not None:
            self.link.write(data)

    def _take_ack(self) -> bytes:
        """An ACK frame's bytes, if one is owed and there is a link to send it on."""
        self._cancel_ack_timer()
        if self.link is None:
            return b""
        received = self.session.take_ack()
        if received is None:
            return b""
        return encode_frame(FrameType.ACK, sequence=received)

    def _cancel_ack_timer(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None

    def close(self) -> None:
        self._cancel_ack_timer()
