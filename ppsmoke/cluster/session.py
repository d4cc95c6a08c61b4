"""A conversation with one peer that outlives its links: every message exactly once, in order. No socket, no clock.

Messages are cut into numbered chunks. What the peer has not acknowledged is kept; a new link starts with what its
HELLO says is missing, and what arrives twice is dropped by its number. A peer that begins a new life (epoch) has lost
what the old one knew: what was meant for the old life is dropped, never delivered to the new one.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ppsmoke.cluster.addresses import MAX_MAILBOX_NAME_BYTES
from ppsmoke.cluster.frames import MAX_PAYLOAD_BYTES, Frame, FrameFlags
from ppsmoke.cluster.handshake import Resume
from ppsmoke.errors import FrameError, MessageError

WINDOW_BYTES = 16 << 20  # 1 Gbit/s over 120 ms; a message is taken whole while less than this is unacknowledged
MAX_MESSAGE_BYTES = 64 << 20  # a float32 prefill of 2,048 tokens at width 8,192
# An ACK leaves at once when this much is owed, else with the next data or by the owner's timer.
ACK_AT_BYTES = 256 << 10
_CHUNK_COST_BYTES = 200  # what a queued chunk takes besides its payload, so that many small messages count too
# What may come before we have acknowledged any of it: a window, and the message that was taken when it was nearly full.
MAX_UNACKED_BYTES = WINDOW_BYTES + MAX_MESSAGE_BYTES + (MAX_MESSAGE_BYTES // MAX_PAYLOAD_BYTES + 2) * _CHUNK_COST_BYTES
_HEAD = struct.Struct("!IB")  # at the front of a message's first chunk: bytes of the message, of the mailbox's name


class Chunk(NamedTuple):
    sequence: int
    flags: int
    payload: bytes | memoryview


class Arrival(NamedTuple):
    """A message that has arrived whole."""

    mailbox: str
    payload: bytes


class Session:
    def __init__(self, *, epoch: int, window_bytes: int = WINDOW_BYTES) -> None:
        """epoch: this node's own."""
        self._epoch = epoch
        self._window_bytes = window_bytes
        self.peer_epoch = 0
        self.acks_held = False  # acknowledge nothing more: nobody takes what has come, so the sender's window closes
        self.dropped_chunks = 0  # meant for an earlier life of the peer
        self.duplicates = 0
        self._forget()

    def _forget(self) -> None:
        self._unsent: deque[Chunk] = deque()
        self._sent: deque[Chunk] = deque()
        self._last_sequence = 0
        self._highest_sent = 0
        self._acked = 0
        self.unacked_bytes = 0
        self._received = 0
        self._acknowledged = 0  # as far as the peer was told
        self._unacked_in = 0  # bytes of what came since
        self._owed_bytes = 0
        self._ack_owed = False
        self._assembly = bytearray()  # not a list of parts: many tiny chunks must not cost more than they bring
        self._missing_bytes = 0
        self._mailbox = ""

    @property
    def has_room(self) -> bool:
        return self.unacked_bytes < self._window_bytes

    @property
    def idle(self) -> bool:
        """Everything that was offered has been acknowledged."""
        return not self._unsent and not self._sent

    @property
    def owes_ack(self) -> bool:
        return self._ack_owed

    @property
    def owes_ack_now(self) -> bool:
        return self._owed_bytes >= ACK_AT_BYTES

    def offer(self, mailbox: str, pieces: Sequence[bytes]) -> None:
        """Take a message, all or nothing. Raises MessageError for one that no peer would take."""
        name = mailbox.encode()
        total = sum(len(piece) for piece in pieces)
        if not 0 < len(name) <= MAX_MAILBOX_NAME_BYTES:
            raise MessageError(f"a mailbox's name has 1 to {MAX_MAILBOX_NAME_BYTES} bytes: {mailbox[:100]!r}")
        if total > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message of {total:,} bytes where {MAX_MESSAGE_BYTES:,} are the most")
        stream = memoryview(b"".join((_HEAD.pack(total, len(name)), name, *pieces)))
        for start in range(0, len(stream), MAX_PAYLOAD_BYTES):
            payload = stream[start : start + MAX_PAYLOAD_BYTES]
            flags = FrameFlags.FIRST if start == 0 else FrameFlags.NONE
            if start + len(payload) == len(stream):
                flags |= FrameFlags.LAST
            self._last_sequence += 1
            self._unsent.append(Chunk(self._last_sequence, flags, payload))
            self.unacked_bytes += len(payload) + _CHUNK_COST_BYTES

    def next_chunk(self) -> Chunk | None:
        """The next chunk for the current link, None if there is none. Taken means sent."""
        if not self._unsent:
            return None
        chunk = self._unsent.popleft()
        self._sent.append(chunk)
        self._highest_sent = max(self._highest_sent, chunk.sequence)
        return chunk

    def on_ack(self, sequence: int) -> None:
        """Forget what the peer has. Raises FrameError if it claims what was never sent."""
        if sequence <= self._acked:
            return
        if sequence > self._highest_sent:
            raise FrameError(f"an acknowledgement of chunk {sequence} that was never sent")
        self._acked = sequence
        for queue in (self._sent, self._unsent):  # an old link may still bring what a new one was to send again
            while queue and queue[0].sequence <= sequence:
                self.unacked_bytes -= len(queue.popleft().payload) + _CHUNK_COST_BYTES

    def on_chunk(self, frame: Frame) -> Arrival | None:
        """The message that this chunk completes. Raises FrameError, with nothing changed, for an impossible one, and
        for one that the peer may not send before we have acknowledged others."""
        if frame.sequence <= self._received:
            self.duplicates += 1
            self._owe(len(frame.payload))
            return None
        if frame.sequence != self._received + 1:
            raise FrameError(f"chunk {frame.sequence} after chunk {self._received}")
        cost = len(frame.payload) + _CHUNK_COST_BYTES
        if self._unacked_in + cost > MAX_UNACKED_BYTES:
            raise FrameError("more than fits into its window", reason="over-window")
        payload, mailbox, missing = frame.payload, self._mailbox, self._missing_bytes
        if bool(frame.flags & FrameFlags.FIRST) == bool(mailbox):
            raise FrameError("a message that starts within another, or goes on without a start")
        if frame.flags & FrameFlags.FIRST:
            mailbox, missing, payload = _read_head(payload)
        elif not payload:
            raise FrameError("a chunk that brings nothing")
        missing -= len(payload)
        if missing < 0 or (missing == 0) != bool(frame.flags & FrameFlags.LAST):
            raise FrameError("a message that is not as long as it said")
        self._received = frame.sequence
        self._unacked_in += cost
        self._owe(len(frame.payload))
        if missing:
            self._assembly += payload
            self._mailbox, self._missing_bytes = mailbox, missing
            return None
        if self._assembly:
            payload = bytes(self._assembly + payload)
        self._assembly, self._mailbox, self._missing_bytes = bytearray(), "", 0
        return Arrival(mailbox, payload)

    def take_ack(self) -> int | None:
        """What to acknowledge, if anything is owed; taken means told."""
        if not self._ack_owed or self.acks_held:
            return None
        self._ack_owed = False
        self._owed_bytes = self._unacked_in = 0
        self._acknowledged = self._received
        return self._received

    def resume(self, current_link: int) -> Resume:
        """For our HELLO on the next link. It acknowledges as well: while that is held, what came comes again."""
        return Resume(self.peer_epoch, self._acknowledged if self.acks_held else self._received, current_link)

    def attach(self, *, peer_epoch: int, peer_resume: Resume) -> bool:
        """Go on over a new link whose HELLO said this. True if the peer has begun a new life: all before is forgotten.

        The HELLO may be older than what the current link has brought since: numbers tell."""
        restarted = self.peer_epoch not in (0, peer_epoch)
        if restarted:
            self.dropped_chunks += len(self._sent) + len(self._unsent)
            self._forget()
        self.peer_epoch = peer_epoch
        if peer_resume.known_epoch == self._epoch:
            self.on_ack(peer_resume.received)
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        self._ack_owed = self._received > 0
        return restarted

    def _owe(self, count: int) -> None:
        self._ack_owed = True
        self._owed_bytes += count


def _read_head(payload: bytes) -> tuple[str, int, bytes]:
    """Mailbox, bytes of the whole message, and what of it this first chunk brings."""
    if len(payload) < _HEAD.size:
        raise FrameError("a message without a head")
    total, name_bytes = _HEAD.unpack_from(payload)
    start = _HEAD.size + name_bytes
    if total > MAX_MESSAGE_BYTES or not 0 < name_bytes <= MAX_MAILBOX_NAME_BYTES or start > len(payload):
        raise FrameError(f"a message's head that claims {total:,} bytes for a name of {name_bytes}")
    try:
        return payload[_HEAD.size : start].decode(), total, payload[start:]
    except UnicodeDecodeError as error:
        raise FrameError("a mailbox's name that is not UTF-8") from error
