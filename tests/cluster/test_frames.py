from __future__ import annotations

import random
import struct

import pytest

from ppsmoke.cluster.frames import MAX_PAYLOAD_BYTES, Frame, FrameDecoder, FrameFlags, FrameType, encode_frame
from ppsmoke.errors import FrameError

FIRST, LAST = FrameFlags.FIRST, FrameFlags.LAST
# length 5, DATA, first and last, channel 0, sequence 7, "hello"
DATA = bytes.fromhex("00000005 05 03 0000 0000000000000007 68656c6c6f")
# length 0, ACK, no flags, channel 0, sequence 42
ACK = bytes.fromhex("00000000 06 00 0000 000000000000002a")
STREAM = DATA + ACK + DATA
FRAMES = [
    Frame(FrameType.DATA, FIRST | LAST, 7, b"hello"),
    Frame(FrameType.ACK, 0, 42, b""),
    Frame(FrameType.DATA, FIRST | LAST, 7, b"hello"),
]


def decode_all(pieces: list[bytes]) -> list[Frame]:
    decoder = FrameDecoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


def test_frames_have_the_bytes_of_the_format():
    assert encode_frame(FrameType.DATA, flags=FIRST | LAST, sequence=7, payload=b"hello") == DATA
    assert encode_frame(FrameType.ACK, sequence=42, before=DATA) == DATA + ACK


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_cut_anywhere_gives_the_same_frames(cut):
    assert decode_all([STREAM[:cut], STREAM[cut:]]) == FRAMES


def test_a_stream_that_comes_byte_by_byte_gives_the_same_frames():
    assert decode_all([bytes([byte]) for byte in STREAM]) == FRAMES


def test_a_burst_of_fillers_is_as_many_frames_wherever_it_is_cut():
    short, long = (encode_frame(FrameType.FILLER, payload=bytes(count)) for count in (3, 48))
    stream = ACK + 3 * long + 2 * short + long + DATA + long
    types = [FrameType.ACK, *6 * [FrameType.FILLER], FrameType.DATA, FrameType.FILLER]
    for cut in range(len(stream) + 1):
        frames = decode_all([stream[:cut], stream[cut:]])
        assert [frame.type for frame in frames] == types
        assert [len(frame.payload) for frame in frames] == [0, 48, 48, 48, 3, 3, 48, 5, 48]


@pytest.mark.parametrize("cut", range(len(DATA)))
def test_a_frame_cut_anywhere_waits_for_its_rest(cut):
    decoder = FrameDecoder()
    assert decoder.feed(DATA[:cut]) == []
    assert decoder.pending_bytes == cut


def header(*, length: int = 0, kind: int = FrameType.PING, flags: int = 0, channel: int = 0) -> bytes:
    return struct.pack("!IBBHQ", length, kind, flags, channel, 1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (header(kind=0), "unknown type 0"),
        (header(kind=12), "unknown type 12"),
        (header(kind=255), "unknown type 255"),
        (header(kind=FrameType.DATA, length=MAX_PAYLOAD_BYTES + 1), "claims 65,537 bytes"),
        (header(kind=FrameType.DATA, length=0xFFFFFFFF), "claims 4,294,967,295 bytes"),
        (header(kind=FrameType.HELLO, length=4097), "HELLO frame that claims 4,097"),
        (header(kind=FrameType.PING, length=1), "PING frame that claims 1 "),
        (header(kind=FrameType.SWIM, length=1401), "SWIM frame that claims 1,401"),
        (header(kind=FrameType.DATA, flags=4), "unknown flags 0x4"),
        (header(kind=FrameType.ACK, flags=1), "unknown flags 0x1"),
        (header(channel=1), "unknown channel 1"),
    ],
)
def test_a_header_that_is_none_of_ours_is_refused_before_its_payload(data, says):
    decoder = FrameDecoder()
    with pytest.raises(FrameError, match=says):
        decoder.feed(DATA + data)
    with pytest.raises(FrameError, match=says):
        decoder.feed(DATA)
    assert decoder.pending_bytes == 0


def test_the_longest_chunk_passes():
    (frame,) = decode_all([encode_frame(FrameType.DATA, sequence=1, payload=bytes(MAX_PAYLOAD_BYTES))])
    assert len(frame.payload) == MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_mutated_streams_give_frames_or_frame_errors_and_hold_no_more_than_came(seed):
    rng = random.Random(seed)
    for _ in range(50):
        stream = bytearray(STREAM + encode_frame(FrameType.HELLO, payload=rng.randbytes(rng.randrange(60))))
        for _ in range(rng.randrange(1, 6)):
            stream[rng.randrange(len(stream))] = rng.randrange(256)
        decoder, came = FrameDecoder(), 0
        try:
            while stream:
                piece, stream = bytes(stream[: (size := rng.randrange(1, 40))]), stream[size:]
                came += len(piece)
                decoder.feed(piece)
                assert decoder.pending_bytes <= came
        except FrameError:
            assert decoder.pending_bytes == 0
