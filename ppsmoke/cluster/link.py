"""One link: an asyncio protocol over TLS that says HELLO, READY, then carries frames until BYE or silence.

A link knows nothing of messages: it hands frames to its owner. What outlives it is the session (session.py).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.frames import Frame, FrameDecoder, FrameType, encode_frame
from ppsmoke.cluster.handshake import Bye, ByeReason, Hello, HelloRefused, KeyRefused, LinkKind, Preamble
from ppsmoke.cluster.identity import PeerIdentity
from ppsmoke.cluster.link_owner import LinkOwner
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.warmth import Warmth
from ppsmoke.errors import FrameError, LinkError

WRITE_BUFFER_BYTES = 128 << 10  # what may lie in user space before a PING; the kernel's part is TCP_NOTSENT_LOWAT
MAX_UNREAD_BYTES = 1 << 20  # beyond the buffer's bound only answers pile up: to a peer that asks and does not read
HEARD_EVERY_S = 0.5  # how often life on a link is told to the owner
FILLER_EVERY_S = 0.1  # facts/network.md, 4.2: TCP's slow start after idle costs 16 KiB a second round trip
FILLER_BYTES = 48  # 64 with the frame's header
TICK_S = 0.001
WARM_S = 10.0  # after its last data a link is kept from idling this long: longer than any step of a running request


_FOR_OWNER = {FrameType.DATA, FrameType.ACK, FrameType.SWIM, FrameType.SIGNAL, FrameType.CARRY}
_FILLER_FRAME = encode_frame(FrameType.FILLER, payload=bytes(FILLER_BYTES))


class DuplicateLink(LinkError):
    """The peer keeps another link to us."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, reason="duplicate")


class Link(asyncio.Protocol):
    """States: tls, hello, ready, up, closing, closed. `opened` is done when it is up or can no longer be."""

    def __init__(
        self, owner: LinkOwner, preamble: Preamble, *, own_id: str, timing: LinkTiming, dialled: bool, name: str = ""
    ) -> None:
        loop = asyncio.get_running_loop()
        self.id = preamble.link_id
        self.kind = LinkKind(preamble.kind)
        self.peer_id = preamble.target if dialled else preamble.source
        self.dialled = dialled
        self.serves = own_id < self.peer_id
        self.dialler_is_lower = dialled == self.serves
        self.peer = PeerIdentity(self.peer_id, name, 0)  # until the certificate says more
        self.hello: Hello | None = None
        self.remote_host = ""
        self.where: Candidate | None = None  # what was dialled, if we dialled
        self.via = ""  # the relay's node id, if it is relayed
        self.replaces: Link | None = None  # kept until the peer is seen to use this one
        self.admission = 0  # in its READY: when the serving side took it; READYs on two links may cross
        self.bytes_in = self.bytes_out = 0
        self.rtt_s: float | None = None
        self.state = "tls"
        self.paused = False
        self._unread = False  # more answers wait than the peer may leave unread
        self.up_at = 0.0
        self.last_heard = 0.0
        self.silent = False  # a ping is without an answer for so long that another link is looked for
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._owner = owner
        self._timing = timing
        self._own_hello: Hello | None = None
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._ping_sent_at: float | None = None
        self._pings = self._ponged = 0
        self._noted_at = 0.0
        self._warmth = Warmth()
        self._warm_until = 0.0
        self._filler: asyncio.TimerHandle | None = None
        self._now: Callable[[], float] = loop.time
        self._call_at = loop.call_at

    def __repr__(self) -> str:
        return f"<Link {self.peer.role or self.peer_id} {self.kind.name.lower()} {self.state}>"

    @property
    def peer_name(self) -> str:
        return self.peer.role or self.peer_id

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if self.state == "closed":  # given up while TLS was at work
            self.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.last_heard = self._now()
        self.remote_host = (transport.get_extra_info("peername") or ("",))[0]
        try:
            self._check_certificate(transport.get_extra_info("ssl_object"))
        except LinkError as error:
            self._fail(error)
            return
        self.state = "hello"
        self._own_hello = self._owner.hello_for(self.peer_id)
        self.write(encode_frame(FrameType.HELLO, payload=self._own_hello.encode()))

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)
        self.last_heard = now = self._now()
        self.silent = False
        if self.state == "closing":
            self._await_bye(data)
            return
        try:
            for frame in self._decoder.feed(data):
                if frame.type is FrameType.FILLER and self.state == "up":
                    continue  # most frames of a link that is kept warm
                self._on_frame(frame)
                if self.state in ("closing", "closed"):
                    return
        except FrameError as error:
            self._break_off(error)
            return
        if now - self._noted_at >= HEARD_EVERY_S and self.state == "up":
            self._noted_at = now
            self._owner.link_heard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.state == "up":
            self._owner.link_writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        was_up, waiting_for_hello = self.state == "up", self.state == "hello"
        self.state = "closed"
        if self._transport is not None:
            self._transport.close()  # it is gone already; up to 3.10 it warns unless told as well
        self._transport = None
        cause = str(exc or "the connection ended without a BYE")
        if waiting_for_hello and not self.serves:
            # Under TLS 1.3 a client is done before its certificate has been judged: a refusal looks like a hang-up.
            self._refuse(KeyRefused(f"{self.peer_name} refused our key ({cause})"))
        else:
            self._refuse(LinkError(f"{self.peer_name} hung up during the handshake ({cause})", reason="hung-up"))
        if was_up:
            # TLS refuses a record that somebody has touched on the way; a missing rest is seen by the missing BYE.
            self._owner.link_broken(self, "tampered" if isinstance(exc, ssl.SSLError) else "cut")
            self._owner.link_down(self, cause, None)
        if not self.closed.done():
            self.closed.set_result(None)

    # --- what the owner calls

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._unread:
            self.bytes_out += len(data)
            self._transport.write(data)
            if self.paused and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._unread = True
                asyncio.get_running_loop().call_soon(self._give_up_unread)

    def keep_warm(self, count: int) -> None:
        """So many bytes have gone out, and more may follow within WARM_S: TCP must not take the pause for idleness."""
        now = self._now()
        self._warm_until = now + WARM_S
        self._warmth.note(count, now)
        if self._filler is None and self._warmth.is_needed:
            self._filler = self._call_at(now + FILLER_EVERY_S, self._on_filler)

    def ping(self) -> None:
        """Ask for a sign of life; the answer measures the round trip."""
        self._pings += 1
        self._ping_sent_at = self._now()
        self.write(encode_frame(FrameType.PING, sequence=self._pings))

    def prove(self, within_s: float) -> None:
        """This machine stood still: a connection that did not outlive it may never say so. A ping, and else the end."""
        self.ping()
        self._call_at(self._now() + within_s, self._on_proof_due, self._pings, within_s)

    def close(self, bye: Bye) -> None:
        """Say why and end. The peer hangs up first; after bye_s we do."""
        if self.state in ("closing", "closed"):
            return
        was_up = self.state == "up"
        if self._transport is None or self.state == "tls":
            self.abort()
            return
        self.write(encode_frame(FrameType.BYE, payload=bye.encode()))
        self._start_closing()
        if was_up:
            self._owner.link_down(self, f"closed by this side: {bye}", None)

    def abort(self) -> None:
        """End now, without a word."""
        if self._transport is not None:
            self._transport.abort()
        elif not self.closed.done() and self.state == "tls":
            self.state = "closed"
            self._refuse(LinkError(f"the link to {self.peer_name} was given up before TLS"))
            self.closed.set_result(None)

    # --- frames

    def _on_frame(self, frame: Frame) -> None:
        kind = frame.type
        if kind is FrameType.BYE:
            self._on_bye(Bye.decode(frame.payload))
        elif self.state == "up":
            self._on_frame_while_up(frame)
        elif kind is FrameType.HELLO and self.state == "hello":
            self._on_hello(Hello.decode(frame.payload))
        elif kind is FrameType.READY and self.state == "ready":
            self._on_ready(frame.sequence)
        else:
            raise FrameError(f"a {kind.name} frame in state {self.state}")

    def _on_frame_while_up(self, frame: Frame) -> None:
        kind = frame.type
        if kind in _FOR_OWNER:
            self._owner.link_frame(self, frame)
        elif kind is FrameType.PING:
            self._owner.link_frame(self, frame)  # what is owed goes before the answer
            self.write(encode_frame(FrameType.PONG, sequence=frame.sequence))
        elif kind is FrameType.PONG:
            self._on_pong(frame.sequence)
        else:
            raise FrameError(f"a {kind.name} frame on a link that is up")

    def _on_hello(self, hello: Hello) -> None:
        try:
            self._own_hello.compare(hello, self.peer_name)
        except HelloRefused as error:
            self.write(encode_frame(FrameType.BYE, payload=Bye(ByeReason.REFUSED, error.cause).encode()))
            self._refuse(error)
            self._owner.link_refused(self, error)
            self._start_closing()
            return
        if hello.node_id != self.peer_id:
            raise FrameError(f"a HELLO of {hello.node_id} under the certificate of {self.peer_id}", reason="wrong-node")
        self.hello = hello
        self.state = "ready"
        if not self.serves:
            self.write(encode_frame(FrameType.READY))

    def _on_ready(self, admission: int) -> None:
        if self.serves:
            refusal = self._owner.admit(self)
            if refusal is not None:
                self._refuse(DuplicateLink(f"not needed: {refusal}"))
                self.close(refusal)
                return
            self.write(encode_frame(FrameType.READY, sequence=self.admission))
        else:
            self.admission = admission
        self.state = "up"
        self.up_at = self._now()
        self._arm(self._timing.ping_after_s)
        self._owner.link_up(self)
        if not self.opened.done():
            self.opened.set_result(None)
        if self.state == "up":
            self.ping()

    def _on_pong(self, sequence: int) -> None:
        self._ponged = sequence
        if self._ping_sent_at is None or sequence != self._pings:
            return  # of an earlier ping: says nothing about now
        sample = self._now() - self._ping_sent_at
        self._ping_sent_at = None
        self.rtt_s = sample if self.rtt_s is None else self.rtt_s + (sample - self.rtt_s) / 8  # RFC 6298

    def _on_bye(self, bye: Bye) -> None:
        was_up = self.state == "up"
        kind = {ByeReason.REFUSED: HelloRefused, ByeReason.DUPLICATE: DuplicateLink}.get(bye.reason, LinkError)
        error = kind(f"{self.peer_name} ended the handshake: {bye}")
        self._refuse(error)
        if bye.reason is ByeReason.REFUSED and not was_up:
            self._owner.link_refused(self, error)
        self._start_closing()
        if self._transport is not None:
            self._transport.close()
        if was_up:
            self._owner.link_down(self, f"{self.peer_name} said: {bye}", bye)

    # --- ends

    def _refuse(self, error: LinkError) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # whoever dialled may have given up: then nobody asks, and that is fine

    def _give_up_unread(self) -> None:
        if self.state == "up":
            self._owner.link_broken(self, "unread")
            self._give_up(f"{self.peer_name} asks and does not read the answers")
        self.abort()

    def _give_up(self, cause: str) -> None:
        """Of a link that was up; without a BYE, which would not be read either."""
        self.state = "closing"
        self._owner.link_down(self, cause, None)
        self.abort()

    def _break_off(self, error: FrameError) -> None:
        """The peer speaks no language of ours: the stream has lost its place, so nothing more can be read."""
        was_up, cause = self.state == "up", f"{self.peer_name} sent {error.cause}"
        reason = error.reason or "bad-frame"
        self._refuse(LinkError(cause, reason=reason))
        self.write(encode_frame(FrameType.BYE, payload=Bye(ByeReason.BROKEN, error.cause).encode()))
        self._start_closing()
        if was_up:
            self._owner.link_broken(self, reason)
            self._owner.link_down(self, cause, None)

    def _fail(self, error: LinkError) -> None:
        self._refuse(error)
        self.abort()

    def _start_closing(self) -> None:
        self.state = "closing"
        self._cancel_timers()
        self._timer = self._call_at(self._now() + self._timing.bye_s, self.abort)

    def _await_bye(self, data: bytes) -> None:
        """We have said BYE. If the peer has as well, neither need wait for the other to hang up."""
        try:
            said_bye = any(frame.type is FrameType.BYE for frame in self._decoder.feed(data))
        except FrameError:
            return  # what broke the link goes on being broken
        if said_bye and self._transport is not None:
            self._transport.close()

    # --- silence

    def _arm(self, delay_s: float) -> None:
        # Not less than a tick: what is due in a rounding error would be so again, each time (see _on_timer).
        self._timer_due = self._now() + max(delay_s, TICK_S)
        self._timer = self._call_at(self._timer_due, self._on_timer)

    def _on_timer(self) -> None:
        now = self._now()
        # As late as our own timer is, so long were we frozen, not the peer: that is no silence of its.
        self.last_heard += max(0.0, now - self._timer_due)
        silence = now - self.last_heard
        if silence >= self._timing.down_after_s:
            return self._give_up(f"no byte from {self.peer_name} for {self._timing.down_after_s:g} s")
        if silence >= self._timing.ping_after_s:
            self.ping()
        until_silent = self._timing.ping_after_s + max(self._timing.answer_s, 2 * (self.rtt_s or 0.0)) - silence
        if until_silent <= 0 and not self.silent:
            self.silent = True
            self._owner.link_silent(self)
        until_ping = self._timing.ping_after_s - silence
        until_down = self._timing.down_after_s - silence
        until_look = until_ping if until_ping > 0 else min(self._timing.ping_after_s, until_down)
        self._arm(min(until_look, until_silent) if until_silent > 0 else until_look)

    def _on_proof_due(self, ping: int, within_s: float) -> None:
        if self.state == "up" and self._ponged < ping:
            self._give_up(f"{self.peer_name} did not answer within {within_s:g} s after this machine stood still")

    def _on_filler(self) -> None:
        now = self._now()
        if now >= self._warm_until or self.state != "up" or not self._warmth.is_needed:
            self._filler = None
            return
        for _ in range(0 if self.paused else self._warmth.fillers_due(now)):
            self.write(_FILLER_FRAME)  # each leaves in a packet of its own
        self._filler = self._call_at(now + FILLER_EVERY_S, self._on_filler)

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._filler):
            if timer is not None:
                timer.cancel()

    def _check_certificate(self, tls: ssl.SSLObject) -> None:
        """OpenSSL has verified the chain; here is who it is. A valid certificate of another node is not good enough."""
        identity = PeerIdentity.shown(tls)
        if identity.node_id != self.peer_id:
            text = f"{identity.role} ({identity.node_id}) answered where {self.peer_name} was expected"
            raise LinkError(text, reason="wrong-node")
        self.peer = identity
