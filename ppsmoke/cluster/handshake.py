"""What two nodes say before a link is up: the preamble on the raw socket, HELLO and BYE inside TLS. Bytes and values.

The preamble tells an acceptor who is meant, so that the TLS roles follow from the two ids, and proves the cluster's
key, so that a stranger never reaches the TLS code.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ppsmoke.cluster.addresses import Candidate, CandidateKind, is_host, is_ip
from ppsmoke.errors import FrameError, LinkError, one_line
from ppsmoke.keys import derive

PROTOCOL_VERSION = 1
PREAMBLE_BYTES = 64
NONCE_BYTES = 16
MAX_CANDIDATES = 8
_MAGIC = b"PPSM"
_PREAMBLE = struct.Struct("!4sBBH8s8s16s8x")  # magic, version, kind, flags, source, target, nonce; then the tag
_TAG_BYTES = 16
_HELLO = struct.Struct("!H8sQQQQH")  # version, node id, epoch, known epoch, received, current link, UDP port
_CANDIDATE_KINDS: tuple[CandidateKind, ...] = ("host", "mapped", "observed")


class LinkKind(IntEnum):
    """How the socket came to be. The lower, the better the path. On the wire RELAYED is a leg to or from a relay."""

    DIRECT = 1
    PUNCHED = 2
    RELAYED = 3
    PROBE = 4  # never a link: is it you, and as whom do you see me


class HelloRefused(LinkError):
    """Both sides are who they say, and do not fit together: other protocol, code or model. Trying again is useless."""

    def __init__(self, cause: str, *, reason: str = "other-hello", **kwargs: Any) -> None:
        super().__init__(cause, reason=reason, **kwargs)


class KeyRefused(LinkError):
    """The peer hung up after our certificate: to it we are nobody."""

    def __init__(self, cause: str, *, reason: str = "key-refused", **kwargs: Any) -> None:
        super().__init__(cause, reason=reason, **kwargs)


@dataclass(frozen=True)
class Preamble:
    """nonce names the link: both sides know it, nobody else chose it."""

    kind: LinkKind
    source: str
    target: str
    nonce: bytes

    @property
    def link_id(self) -> int:
        """Never 0, which stands for no link."""
        return link_id_of(self.nonce)

    def seal(self, key: bytes) -> bytes:
        body = _PREAMBLE.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            self.kind,
            0,
            bytes.fromhex(self.source),
            bytes.fromhex(self.target),
            self.nonce,
        )
        return body + _tag(key, body)

    @classmethod
    def open(cls, data: bytes, key: bytes) -> Preamble:
        """Raises FrameError for anything that the holder of key has not sealed."""
        body, tag = data[: _PREAMBLE.size], data[_PREAMBLE.size :]
        if len(data) != PREAMBLE_BYTES or not hmac.compare_digest(tag, _tag(key, body)):
            raise FrameError("a preamble without the cluster's key", reason="wrong-preamble")
        magic, version, kind, flags, source, target, nonce = _PREAMBLE.unpack(body)
        if magic != _MAGIC or version != PROTOCOL_VERSION or flags or kind not in set(LinkKind):
            text = f"a preamble of another protocol: version {version}, kind {kind}, flags {flags}"
            raise FrameError(text, reason="other-protocol")
        return cls(LinkKind(kind), source.hex(), target.hex(), nonce)


def link_id_of(nonce: bytes) -> int:
    return int.from_bytes(nonce[:8], "big") | 1


def preamble_key(cluster_key: bytes) -> bytes:
    return derive(cluster_key, "preamble")


@dataclass(frozen=True)
class Observed:
    """The answer to a probe: the address that it came from, in the same size as a preamble."""

    host: str
    port: int

    def seal(self, key: bytes, nonce: bytes) -> bytes:
        host = self.host.encode()[: PREAMBLE_BYTES - _TAG_BYTES - 3]
        body = (struct.pack("!HB", self.port, len(host)) + host).ljust(PREAMBLE_BYTES - _TAG_BYTES, b"\0")
        return body + _tag(key, nonce + body)

    @classmethod
    def open(cls, data: bytes, key: bytes, nonce: bytes) -> Observed:
        """Raises FrameError unless a member of this cluster answered this very probe."""
        body, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if len(data) != PREAMBLE_BYTES or not hmac.compare_digest(tag, _tag(key, nonce + body)):
            raise FrameError("an answer to a probe without the cluster's key")
        port, length = struct.unpack_from("!HB", body)
        host = body[3 : 3 + length].decode(errors="replace")
        if not is_ip(host):
            raise FrameError(f"an answer to a probe with {host[:80]!r} for an address")
        return cls(host, port)


def _tag(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=_TAG_BYTES).digest()


@dataclass(frozen=True)
class Resume:
    """Where a conversation with a peer stands: what a new link must know to go on with it."""

    known_epoch: int = 0  # the peer's epoch as we know it, 0: never met
    received: int = 0  # its last chunk that we have, of that epoch
    current_link: int = 0  # the link that we hold to it now, 0: none


@dataclass(frozen=True)
class Hello:
    """The first frame of both sides. epoch: which life of the node this is (its start, in ms)."""

    version: int
    node_id: str
    epoch: int
    resume: Resume
    udp_port: int | None
    code_hash: str
    model: str
    candidates: tuple[Candidate, ...]

    def encode(self) -> bytes:
        resume = self.resume
        return b"".join(
            (
                _HELLO.pack(
                    self.version,
                    bytes.fromhex(self.node_id),
                    self.epoch,
                    resume.known_epoch,
                    resume.received,
                    resume.current_link,
                    self.udp_port or 0,
                ),
                _text(self.code_hash),
                _text(self.model),
                encode_candidates(self.candidates),
            )
        )

    @classmethod
    def decode(cls, payload: bytes) -> Hello:
        """Raises FrameError. Of another protocol version only the version is read."""
        if len(payload) < 2:
            raise FrameError("a HELLO without a version")
        version = int.from_bytes(payload[:2], "big")
        if version != PROTOCOL_VERSION:
            return cls(version, "", 0, Resume(), None, "", "", ())
        if len(payload) < _HELLO.size:
            raise FrameError("a HELLO that ends early")
        _, node_id, epoch, known, received, link, udp_port = _HELLO.unpack_from(payload)
        code_hash, at = _read_text(payload, _HELLO.size)
        model, at = _read_text(payload, at)
        candidates = decode_candidates(payload[at:])
        resume = Resume(known, received, link)
        return cls(version, node_id.hex(), epoch, resume, udp_port or None, code_hash, model, candidates)

    def compare(self, peer: Hello, peer_name: str) -> None:
        """Raises HelloRefused, naming both sides' values, unless the two can work together."""
        if peer.version != self.version:
            raise HelloRefused(
                f"this side speaks protocol {self.version}, {peer_name} speaks {peer.version}",
                hint="run the same version of ppsmoke on both sides",
            )
        if peer.code_hash != self.code_hash:
            raise HelloRefused(
                f"this side runs code {_short(self.code_hash)}, {peer_name} runs {_short(peer.code_hash)}",
                hint="run the same version of ppsmoke on both sides",
            )
        if peer.model != self.model:
            raise HelloRefused(
                f"this side expects model {_short(self.model)}, {peer_name} has {_short(peer.model)}",
                hint="start every stage with the same --model",
            )


def encode_candidates(candidates: Sequence[Candidate]) -> bytes:
    """A count, then kind, TCP port, UDP port (0: none) and host of each; also a member's meta in SWIM."""
    parts = [bytes([len(candidates)])]
    for candidate in candidates:
        kind = _CANDIDATE_KINDS.index(candidate.kind)
        parts.append(struct.pack("!BHH", kind, candidate.tcp_port, candidate.udp_port or 0) + _text(candidate.host))
    return b"".join(parts)


def decode_candidates(data: bytes) -> tuple[Candidate, ...]:
    """Raises FrameError."""
    if not data or data[0] > MAX_CANDIDATES:
        raise FrameError("a list of candidates without a count, or with too many")
    found, at = [], 1
    for _ in range(data[0]):
        if len(data) < at + 5:
            raise FrameError("a list of candidates that ends early")
        kind, tcp_port, udp_port = struct.unpack_from("!BHH", data, at)
        host, at = _read_text(data, at + 5)
        if kind >= len(_CANDIDATE_KINDS) or not tcp_port or not is_host(host):
            raise FrameError(f"a candidate that cannot be dialled: kind {kind}, {host[:80]!r}, port {tcp_port}")
        found.append(Candidate(_CANDIDATE_KINDS[kind], host, tcp_port, udp_port or None))
    if at != len(data):
        raise FrameError("a list of candidates with more behind it")
    return tuple(found)


class ByeReason(IntEnum):
    LEAVING = 1  # the node ends: do not dial it again
    DUPLICATE = 2  # another link between the two is kept
    REFUSED = 3  # HELLOs that do not fit together
    BROKEN = 4  # bytes that are none of our protocol
    SUPERSEDED = 5  # a later life of the same node, or a later assignment of its role, has taken over


@dataclass(frozen=True)
class Bye:
    reason: ByeReason
    text: str = ""

    def encode(self) -> bytes:
        return bytes([self.reason]) + self.text.encode()[:1000]

    @classmethod
    def decode(cls, payload: bytes) -> Bye:
        """Raises FrameError."""
        if not payload or payload[0] not in set(ByeReason):
            raise FrameError("a BYE without a reason")
        return cls(ByeReason(payload[0]), one_line(payload[1:].decode(errors="replace")))

    def __str__(self) -> str:
        return self.text or self.reason.name.lower()


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > 255:
        raise ValueError(f"a text of {len(data)} bytes where 255 fit")
    return bytes([len(data)]) + data


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    if at >= len(data) or at + 1 + data[at] > len(data):
        raise FrameError("a text that ends early")
    end = at + 1 + data[at]
    try:
        return data[at + 1 : end].decode(), end
    except UnicodeDecodeError as error:
        raise FrameError("a text that is not UTF-8") from error


def _short(value: str) -> str:
    return one_line(value if len(value) <= 16 else f"{value[:12]}..")
