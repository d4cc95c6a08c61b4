"""The decoders that remember: a link with all behind it, a session, a SWIM core. Each input meets a fresh one."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.frames import Frame, FrameType
from ppsmoke.cluster.handshake import LinkKind, Preamble, Resume
from ppsmoke.cluster.identity import ALPN, RunAuthority
from ppsmoke.cluster.link import Link
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.mailbox import Mailboxes
from ppsmoke.cluster.peer import PeerContext
from ppsmoke.cluster.roster import Roster
from ppsmoke.cluster.session import Session
from ppsmoke.cluster.swim import Core
from ppsmoke.cluster.swim_packets import encode
from ppsmoke.cluster.swim_state import Command, Config, Send, Timer
from ppsmoke.errors import FrameError
from tests.lab.fuzz.mutate import mutated
from tests.lab.fuzz.plain import FRAMES, HEAD, HELLO, PACKETS
from tests.lab.fuzz.still_loop import still_loop
from tests.lab.fuzz.target import Target

MAX_ANSWER_BASE, MAX_ANSWER_MULTIPLE = 64 << 10, 16  # bytes that leave for the bytes that came
PEER = RunAuthority(b"r" * 32).mint("stage-0-of-2")
OWN_ID = "0123456789abcdef"
ME, EPOCH = "00000000000000ee", 1_800_000_000_000
SENDERS = ("00112233445566aa", "ffeeddccbbaa9988", "0000000000000001")
# A HELLO of the peer whose certificate it is; what follows it is anything.
GREETING = b"".join(
    struct.pack("!IBBHQ", len(payload), kind, 0, 0, 0) + payload
    for kind, payload in (
        (FrameType.HELLO, replace(HELLO, node_id=PEER.node_id, resume=Resume()).encode()),
        (FrameType.READY, b""),
    )
)


class _Tls:
    def getpeercert(self, *, binary_form: bool) -> bytes:
        return PEER.leaf_der

    def selected_alpn_protocol(self) -> str:
        return ALPN


class _Transport:
    """Takes what is written, and is closed when it is told to be."""

    def __init__(self) -> None:
        self.written = 0
        self.ended = False

    def get_extra_info(self, name: str) -> object:
        return _Tls() if name == "ssl_object" else ("127.0.0.1", 1)

    def set_write_buffer_limits(self, *, high: int) -> None: ...

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.ended = True

    close = abort


def link(data: bytes) -> None:
    """All of a node but its sockets, from TLS's end on: the first byte says how the rest is cut. FrameError for a link
    that has ended."""
    with still_loop():
        boxes = Mailboxes(Signal())
        context = PeerContext(
            epoch=7,
            window_bytes=1 << 20,
            link_grace_s=1,
            deliver=boxes.deliver,
            changed=Signal(),
            flushed=Signal(),
        )
        roster = Roster(OWN_ID, context, code_hash="ab" * 32, model="cd" * 32, emit=lambda event: None)
        preamble = Preamble(LinkKind.DIRECT, PEER.node_id, OWN_ID, bytes(16))
        made = Link(roster, preamble, own_id=OWN_ID, timing=LinkTiming(), dialled=False)
        transport = _Transport()
        made.connection_made(transport)  # type: ignore[arg-type]
        size = 1 + data[0] * 7 if data else 1
        for start in range(1, len(data), size):
            if transport.ended:
                break
            made.data_received(data[start : start + size])
        assert made.state in ("hello", "ready", "up", "closing"), made.state
        assert transport.written <= MAX_ANSWER_BASE + MAX_ANSWER_MULTIPLE * len(data), "it answers more than it hears"
        refused = made.opened.exception() if made.opened.done() else None
        closing = made.state == "closing"
        made.connection_lost(None)
        assert made.closed.done() and made.opened.done()
        if not made.opened.cancelled():
            made.opened.exception()
        if refused is not None:
            raise FrameError(getattr(refused, "cause", str(refused)))
        if closing:
            broken = [name for name in roster.counts if name != "cut"]
            raise FrameError(broken[0] if broken else "ended")


def link_input(rng: random.Random) -> bytes:
    """Mostly beyond the greeting, where most of the code is."""
    greeting = mutated(rng, [GREETING]) if rng.random() < 0.2 else GREETING
    body = b"".join(rng.choice(FRAMES[2:]) for _ in range(rng.randrange(6)))
    return bytes([rng.getrandbits(8)]) + greeting + mutated(rng, [body, *FRAMES])


_RECORD = struct.Struct("!BBHH")  # what, flags, sequence, bytes of payload


def session(data: bytes) -> None:
    """Chunks, acknowledgements and new links in any order; each record is a call. What it refuses changes nothing."""
    one, at = Session(epoch=1, window_bytes=1 << 16), 0
    one.attach(peer_epoch=2, peer_resume=Resume())
    for number in range(3):
        one.offer("box", [bytes(10 * number)])
    refused: FrameError | None = None
    while at + _RECORD.size <= len(data):
        what, flags, sequence, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        payload = data[at : at + size]
        at += len(payload)
        before = (one._received, one.unacked_bytes, len(one._assembly))
        try:
            if what % 4 < 2:
                one.on_chunk(Frame(FrameType.DATA, flags & 3, sequence, payload))
            elif what % 4 == 2:
                one.next_chunk()
                one.on_ack(sequence)
            else:
                one.attach(peer_epoch=2 + flags % 2, peer_resume=Resume(sequence % 3, size, 0))
        except FrameError as error:
            refused = error
            assert what % 4 > 2 or before == (one._received, one.unacked_bytes, len(one._assembly)), "half a change"
            break
    one.take_ack()
    assert one.unacked_bytes >= 0 and len(one._assembly) <= len(data)
    if refused is not None:
        raise refused


def _records() -> list[bytes]:
    def chunk(flags: int, sequence: int, payload: bytes) -> bytes:
        return _RECORD.pack(0, flags, sequence, len(payload)) + payload

    whole = chunk(3, 1, HEAD + b"a message") + chunk(1, 2, HEAD + b"half") + chunk(2, 3, b"other")
    ack, attach = _RECORD.pack(2, 0, 1, 0), _RECORD.pack(3, 0, 1, 0)
    return [whole, whole + ack + chunk(3, 2, HEAD + b"a message"), whole + attach + whole, ack + attach + whole]


_PACKET = struct.Struct("!HBB")  # bytes of the packet, who from which life, seconds before it


def swim_core(data: bytes) -> None:
    """A few packets of several senders, with time between them, into a core with two members."""
    core = Core(Config(), ME, EPOCH, random.Random(0), meta=b"me")
    timers: list[tuple[int, int]] = []
    left, now, at = 0, 0, 0

    def perform(commands: list[Command]) -> None:
        nonlocal left
        for command in commands:
            if isinstance(command, Timer):
                timers.append((command.at, command.token))
            elif isinstance(command, Send):
                assert command.to != ME and len(command.payload) <= core.config.payload_limit
                left += len(command.payload)

    perform(core.start(0))
    perform(core.register(0, "pp-entry", b"mine"))
    while at + _PACKET.size <= len(data):
        size, who, wait = _PACKET.unpack_from(data, at)
        at += _PACKET.size
        now += (wait % 4) * 500_000
        for due in sorted(one for one in timers if one[0] <= now):
            timers.remove(due)
            perform(core.on_timer(max(now, due[0]), due[1]))
        epoch = (EPOCH, EPOCH, 5, (1 << 64) - 1)[who >> 6]
        via = "link" if who & 4 else "udp"
        perform(core.on_datagram(now, SENDERS[who % 3], epoch, data[at : at + size], via=via))
        at += size
    mine = core.names.get("pp-entry", ME)
    assert mine is not None and mine.value == b"mine" and ME not in core.table.members
    assert len(core.table.members) <= core.config.max_members and len(timers) < 200
    assert left <= MAX_ANSWER_BASE + MAX_ANSWER_MULTIPLE * len(data), "it answers more than it hears"
    refused = [reason for reason in core.counts if reason != "own-echo"]
    if refused:
        raise FrameError(refused[0])


def _packets(rng: random.Random) -> bytes:
    """A mutated packet is most often alone or last: behind a broken length nothing is read."""
    parts = []
    for _ in range(rng.randrange(1, 5)):
        packet = encode(rng.choice(PACKETS))
        if rng.random() < 0.6:
            packet = mutated(rng, [packet])[: (1 << 16) - 1]
        parts.append(_PACKET.pack(len(packet), rng.getrandbits(8), rng.getrandbits(8)) + packet)
    return b"".join(parts)


def targets() -> list[Target]:
    return [
        Target("link", link, (FrameError,), generate=link_input),
        Target("session", session, (FrameError,), _records()),
        Target("swim-core", swim_core, (FrameError,), generate=_packets),
    ]
