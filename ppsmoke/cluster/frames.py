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


class _Limit(NamedTuple):
    """What frames of a type may carry."""

    type: FrameType
    most: int  # bytes of payload
    flags: int = FrameFlags.NONE


# A type that is not here is refused.
_LIMITS: dict[int, _Limit] = {
    limit.type: limit
    for limit in (
        _Limit(FrameType.HELLO, 4096),
        _Limit(FrameType.READY, 0),
        _Limit(FrameType.PING, 0),
        _Limit(FrameType.PONG, 0),
        _Limit(FrameType.DATA, MAX_PAYLOAD_BYTES, FrameFlags.FIRST | FrameFlags.LAST),
        _Limit(FrameType.ACK, 0),
        _Limit(FrameType.SWIM, 1400),
        _Limit(FrameType.BYE, 1024),
        _Limit(FrameType.FILLER, 64),
        _Limit(FrameType.SIGNAL, 1400),
        _Limit(FrameType.CARRY, 1416),
    )
}
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
        if not self._buffer:  # most reads start with a frame, and end with one: then nothing is copied into the buffer
            frames, end = self._cut(data)
            self._buffer += data[end:]
            return frames
        self._buffer += data
        with memoryview(self._buffer) as view:
            frames, end = self._cut(view)
        del self._buffer[:end]
        return frames

    def _cut(self, source: bytes | memoryview) -> tuple[list[Frame], int]:
        """The whole frames at its front, and where the last of them ends."""
        frames, at, size = [], 0, len(source)
        while (start := at + HEADER_BYTES) <= size:
            length, kind, flags, channel, sequence = HEADER.unpack_from(source, at)
            limit = _LIMITS.get(kind)
            if limit is None or length > limit.most or flags & ~limit.flags or channel != _CHANNEL:
                self._fail(_why_not(limit, length, kind, flags, channel))
            end = start + length
            if end > size:
                break
            frame = Frame(limit.type, flags, sequence, bytes(source[start:end]))
            frames.append(frame)
            if frame.type is FrameType.FILLER:
                same, step = source[at:end], end - at
                while source[end : end + step] == same:  # fillers come in bursts
                    frames.append(frame)
                    end += step
            at = end
        return frames, at

    def _fail(self, cause: str) -> NoReturn:
        self._broken = cause
        self._buffer = bytearray()
        raise FrameError(cause)


def _why_not(limit: _Limit | None, length: int, kind: int, flags: int, channel: int) -> str:
    """What is wrong with a header that is none of ours."""
    if limit is None:
        return f"a frame of unknown type {kind}"
    if length > limit.most:
        return f"a {limit.type.name} frame that claims {length:,} bytes, {limit.most:,} at most"
    if flags & ~limit.flags:
        return f"a {limit.type.name} frame with unknown flags {flags:#x}"
    return f"a {limit.type.name} frame on unknown channel {channel}"
