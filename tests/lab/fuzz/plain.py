"""The decoders that are functions of bytes: of frames, handshakes, datagrams, membership, signals and messages."""

from __future__ import annotations

import random
import struct

from ppsmoke.cluster.addresses import Address, Candidate, is_host, is_ip
from ppsmoke.cluster.advertising import udp_candidates
from ppsmoke.cluster.frames import FrameDecoder, FrameFlags, FrameType, encode_frame
from ppsmoke.cluster.handshake import (
    PREAMBLE_BYTES,
    PROTOCOL_VERSION,
    Bye,
    ByeReason,
    Hello,
    LinkKind,
    Observed,
    Preamble,
    Resume,
    _tag,
    decode_candidates,
    encode_candidates,
    preamble_key,
)
from ppsmoke.cluster.identity import PeerIdentity, RunAuthority
from ppsmoke.cluster.names import NameEntry
from ppsmoke.cluster.seal import Opener, Sealer
from ppsmoke.cluster.signals import (
    Connect,
    DialBack,
    DialledBack,
    LegClosed,
    Mapped,
    NoLeg,
    NoPunch,
    PunchAsk,
    PunchAt,
    Rendezvous,
    Token,
    decode_signal,
    encode_signal,
)
from ppsmoke.cluster.swim_packets import (
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
    encode,
)
from ppsmoke.cluster.swim_state import State
from ppsmoke.errors import FrameError, LinkError, MessageError
from ppsmoke.pipeline import messages
from tests.lab.fuzz.mutate import mutated
from tests.lab.fuzz.target import Target

KEY = preamble_key(b"k" * 32)
A, B, TOKEN = "00112233445566aa", "ffeeddccbbaa9988", bytes(range(16))
CANDIDATES = (
    Candidate("host", "10.0.0.7", 7070, 7071),
    Candidate("mapped", "fe80::1", 40001),
    Candidate("host", "h", 1),
)
HELLO = Hello(PROTOCOL_VERSION, A, 1_800_000_000_000, Resume(7, 41, 9), 7071, "ab" * 32, "cd" * 32, CANDIDATES)
BYES = [Bye(reason, "because\u00fc") for reason in ByeReason]
SIGNALS = [
    Connect(A), Token(TOKEN, A, True, False), NoLeg(A, "no link"), LegClosed(TOKEN, A, "hung up"), PunchAsk(A),
    Rendezvous(TOKEN, A, 40001), Mapped(TOKEN, 50000, 120000, (("10.0.0.7", 50000),), ""),
    PunchAt(TOKEN, A, 50000, (("198.51.100.1", 50000), ("fd00::1", 1))), NoPunch(A, "another port", True),
    DialBack(7, A, "203.0.113.7", 40001), DialledBack(7, ""),
]  # fmt: skip
UPDATES = [
    MemberUpdate(State.ALIVE, A, 1_800_000_000_000, 2, meta=encode_candidates(CANDIDATES)),
    MemberUpdate(State.SUSPECT, A, 5, 0, B),
    MemberUpdate(State.LEFT, B, 6, 1),
    NameEntry("pp-entry", B, 6, 1, 3, b"stage"),
    NameEntry("pp-stage-1", A, 6, 2, 0, b"stage", True),
]
PACKETS = [
    Packet(0, False, Ping(1, 7, bytes(8)), UPDATES[:1]), Packet(9, True, Ack(1, bytes(8))),
    Packet(0, False, PingRequest(2, B, 400)), Packet(0, False, Nack(2)), Packet(0, False, ForwardedAck(2, B)),
    Packet(0, False, Gossip(), UPDATES), Packet(0, True, Sync(3, True), UPDATES[::-1]), Packet(0, False, Stale(5, 6)),
]  # fmt: skip
HEAD = struct.pack("!IB", 9, 5) + b"stage"
FRAMES = [
    encode_frame(FrameType.HELLO, payload=HELLO.encode()),
    encode_frame(FrameType.READY),
    encode_frame(FrameType.PING, sequence=1),
    encode_frame(FrameType.PONG, sequence=1),
    encode_frame(FrameType.DATA, flags=FrameFlags.FIRST | FrameFlags.LAST, sequence=1, payload=HEAD + b"a message"),
    encode_frame(FrameType.DATA, flags=FrameFlags.FIRST, sequence=2, payload=HEAD + b"half"),
    encode_frame(FrameType.DATA, flags=FrameFlags.LAST, sequence=3, payload=b"other"),
    encode_frame(FrameType.ACK, sequence=0),
    encode_frame(FrameType.SWIM, payload=bytes(8) + encode(PACKETS[5])),
    *(encode_frame(FrameType.SIGNAL, payload=encode_signal(signal)) for signal in SIGNALS),
    encode_frame(FrameType.CARRY, payload=bytes.fromhex(A + B) + bytes(8) + encode(PACKETS[0])),
    encode_frame(FrameType.FILLER, payload=bytes(48)),
]
REPLY_TO = f"{A}/orchestrator"
MESSAGES: list[messages.Message] = [
    messages.InferenceRequest(request_id=1, max_tokens=64, raw=False, reply_to=REPLY_TO, prompt="Say hello"),
    messages.StageActivation(
        request_id=1, position=0, seq_len=2, hidden_dim=3, dtype="bfloat16", is_prefill=True, last_chunk=True,
        max_tokens=9, reply_to=REPLY_TO, compute_us=(5,), prompt_token_ids=(1, 2), hidden=bytes(12),
    ),
    messages.StageActivation(
        request_id=1, position=7, seq_len=1, hidden_dim=3, dtype="float32", is_prefill=False, last_chunk=True,
        max_tokens=0, hidden=bytes(12),
    ),
    messages.NextToken(request_id=1, token_id=42, position=17, done=False, compute_us=(1, 2)),
    messages.InferenceResponse(
        request_id=1, finish_reason="stop", token_ids=(5, 2), prompt_token_ids=(1,), text="Hi",
        timings_json='{"prefill_us": 5, "token_us": [5], "stage_us": [[2, 1]]}',
    ),
    messages.StageStatus(stage=0, state="ready", done=1, total=2, token_id=-1, detail_json='{"blocks": [0, 3]}'),
    messages.StageFailed(request_id=0, stage=1, phase="load", cause="no clang", detail="d", hint="install it"),
    messages.Reset(request_id=1),
]  # fmt: skip


def frames(data: bytes) -> None:
    """A stream of frames, in pieces whose sizes the stream itself gives."""
    decoder, at, came = FrameDecoder(), 0, 0
    while at < len(data):
        piece = data[at : at + 1 + data[at] % 97]
        at += len(piece)
        came += len(piece)
        decoder.feed(piece)
        assert decoder.pending_bytes <= came, "it holds more than came"


def swim_packet(data: bytes) -> None:
    assert encode(decode(data)) == data, "two encodings of one packet"


def message(data: bytes) -> None:
    assert messages.encode(messages.decode(data)) == data, "two encodings of one message"


def signal(data: bytes) -> None:
    found = decode_signal(data)
    for hosts in (getattr(found, "hosts", ()), getattr(found, "targets", ())):
        assert all(is_ip(host) for host, _ in hosts), "an address that is none"
    decode_signal(encode_signal(found))


def hello(data: bytes) -> None:
    found = Hello.decode(data)
    if found.version == PROTOCOL_VERSION:
        assert Hello.decode(found.encode()) == found
        assert all(is_host(one.host) for one in found.candidates), "a host that no resolver takes"


def meta(data: bytes) -> None:
    udp_candidates(data)
    decode_candidates(data)


def bye(data: bytes) -> None:
    assert str(Bye.decode(data)).isprintable()


def address(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    assert str(Address.parse(text)) == text


def keyed_preamble(rng: random.Random) -> bytes:
    """What only a holder of the cluster's key can send: the tag is right, whatever stands before it."""
    body = Preamble(LinkKind(1 + rng.getrandbits(2)), A, B, TOKEN).seal(KEY)[:-16]
    body = mutated(rng, [body])[: len(body)].ljust(len(body), b"\0")
    return body + _tag(KEY, body)


def keyed_observed(rng: random.Random) -> bytes:
    body = mutated(rng, [Observed("198.51.100.1", 50000).seal(KEY, TOKEN)[:-16]])[:48].ljust(48, b"\xff")
    return body + _tag(KEY, TOKEN + body)


def opened(data: bytes) -> None:
    Opener(b"k" * 32, node_id=B).open(data)


def _sealed() -> list[bytes]:
    sealer = Sealer(b"k" * 32, node_id=A, epoch=7)
    return [sealer.seal(encode(packet)) for packet in PACKETS]


def _preambles() -> list[bytes]:
    return [Preamble(kind, A, B, TOKEN).seal(KEY) for kind in LinkKind]


def _leaves() -> list[bytes]:
    authority = RunAuthority(b"r" * 32)
    return [authority.mint("stage-0-of-2").leaf_der, authority.mint("orchestrator", 3).leaf_der, authority.ca_der]


def targets() -> list[Target]:
    assert len(_preambles()[0]) == PREAMBLE_BYTES
    streams = [b"".join(FRAMES), b"".join(FRAMES[2:8]), *FRAMES]
    hellos = [HELLO.encode(), HELLO.encode()[:60]]
    bad = (FrameError,)
    return [
        Target("frames", frames, bad, streams),
        Target("hello", hello, bad, hellos),
        Target("bye", bye, bad, [one.encode() for one in BYES]),
        Target("meta", meta, bad, [encode_candidates(CANDIDATES), encode_candidates(())]),
        Target("preamble", lambda data: Preamble.open(data, KEY), bad, _preambles()),
        Target("preamble-keyed", lambda data: Preamble.open(data, KEY), bad, generate=keyed_preamble),
        Target("probe-answer", lambda data: Observed.open(data, KEY, TOKEN), bad, generate=keyed_observed),
        Target("certificate", PeerIdentity.read, (LinkError,), _leaves()),
        Target("datagram", opened, bad, _sealed()),
        Target("swim-packet", swim_packet, (PacketError,), [encode(packet) for packet in PACKETS]),
        Target("signal", signal, bad, [encode_signal(one) for one in SIGNALS]),
        Target("address", address, (ValueError,), [REPLY_TO.encode(), f"{B}/s".encode()]),
        Target("message", message, (MessageError,), [messages.encode(one) for one in MESSAGES]),
    ]
