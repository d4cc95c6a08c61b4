"""The frames of a link, bytes in and frames out: no socket, no clock.

A frame is a 16-byte header `!IBBHQ` (payload length, type, flags, channel, sequence) and its payload. Nothing is
allocated on a header's word: the decoder holds what has arrived, and refuses a length it would not wait for.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, NoReturn

from ppsmoke.errors import FrameError

HEADER = struct.Struct("!IBBHQ")
HEADER_BYTES = HEADER.size
MAX_PAYLOAD_BYTES = 64 << 10  # a PING never waits behind more than one of these (facts/network.md, 4.2)


class FrameType(IntEnum):
    HELLO = 1
    READY = 2
    PING = 3
    PONG = 4
    DATA = 5
    ACK = 6  # sequence: every chunk up to this one has arrived
    SWIM = 7  # a membership datagram that goes over the link: may be dropped, never retransmitted
    BYE = 8
    FILLER = 9  # keeps TCP's window open through an idle gap; carries nothing
    SIGNAL = 10  # about ways to reach a third node (signals.py)
    CARRY = 11  # a membership datagram for a third node: its source, its target, itself; may be dropped


class FrameFlags:
    """Plain bits: ~ on an IntFlag leaves out the unknown ones, which are what a check is for."""

    NONE = 0
    FIRST = 1  # the first chunk of a message
    LAST = 2  # and its last


class Frame(NamedTuple):
    type: FrameType
    flags: int
    sequence: int
    payload: bytes


# What each type may carry: (most payload bytes, flags it may have). A type that is not here is refused.
_LIMITS: dict[int, tuple[int, int]] = {
    FrameType.HELLO: (4096, 0),
    FrameType.READY: (0, 0),
    FrameType.PING: (0, 0),
    FrameType.PONG: (0, 0),
    FrameType.DATA: (MAX_PAYLOAD_BYTES, FrameFlags.FIRST | FrameFlags.LAST),
    FrameType.ACK: (0, 0),
    FrameType.SWIM: (1400, 0),
    FrameType.BYE: (1024, 0),
    FrameType.FILLER: (64, 0),
    FrameType.SIGNAL: (1400, 0),
    FrameType.CARRY: (1416, 0),
}
_TYPES = {int(kind): kind for kind in FrameType}
_CHANNEL = 0  # the only one so far; the field is there for links that will carry more than one stream


def encode_frame(
    kind: FrameType, *, flags: int = 0, sequence: int = 0, payload: bytes | memoryview = b"", before: bytes = b""
) -> bytes:
    """One frame's bytes, after those of `before` (frames that shall leave in the same write)."""
    return b"".join((before, HEADER.pack(len(payload), kind, flags, _CHANNEL, sequence), payload))


class FrameDecoder:
    """Cuts a byte stream into frames. After a FrameError it gives no more: the stream has lost its place."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken = ""

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not all arrived."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that data completes, in order. Raises FrameError at the first header that is none of ours;
        the frames before it in the same data are lost with it, as is the link."""
        if self._broken:
            raise FrameError(self._broken)
        # Most of the time a read starts and ends with a frame: then nothing is copied into the buffer.
        if self._buffer:
            self._buffer += data
            source: bytes | bytearray = self._buffer
        else:
            source = data
        frames, at = [], 0
        with memoryview(source) as view:
            while len(view) - at >= HEADER_BYTES:
                length, kind, flags, channel, sequence = HEADER.unpack_from(view, at)
                frame_type = self._check(length, kind, flags, channel)
                end = at + HEADER_BYTES + length
                if end > len(view):
                    break
                frames.append(Frame(frame_type, flags, sequence, bytes(view[at + HEADER_BYTES : end])))
                at = end
        if source is data:
            self._buffer += data[at:]
        else:
            del self._buffer[:at]
        return frames

    def _check(self, length: int, kind: int, flags: int, channel: int) -> FrameType:
        limit = _LIMITS.get(kind)
        if limit is None:
            self._fail(f"a frame of unknown type {kind}")
        most, allowed = limit
        if length > most:
            self._fail(f"a {_TYPES[kind].name} frame that claims {length:,} bytes, {most:,} at most")
        if flags & ~allowed:
            self._fail(f"a {_TYPES[kind].name} frame with unknown flags {flags:#x}")
        if channel != _CHANNEL:
            self._fail(f"a {_TYPES[kind].name} frame on unknown channel {channel}")
        return _TYPES[kind]

    def _fail(self, cause: str) -> NoReturn:
        self._broken = cause
        self._buffer = bytearray()
        raise FrameError(cause)
