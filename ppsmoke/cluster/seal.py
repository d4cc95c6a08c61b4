"""Sealed datagrams: encrypted, authenticated, never accepted twice. The standard library has no cipher, so:

a SHAKE-256 key stream over key and nonce, and a keyed BLAKE2b-128 over header and ciphertext (encrypt, then
authenticate). The nonce is (sender, epoch, counter): a sender never uses one twice, because its epoch is its boot time.
All members share the key, so a member could pose as another here: membership authorises nothing, links do. A receiver
that has just started has seen nothing yet and takes an old datagram for new, once; claims are ordered, so it learns
nothing false from it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

from ppsmoke.errors import FrameError
from ppsmoke.keys import derive

MAGIC = b"pps\x01"  # the last byte is the version
TAG_BYTES = 16
WINDOW = 1024  # counters behind the newest that may still arrive, once each
MAX_EPOCHS_PER_SENDER = 4  # lives whose windows are kept; older ones are refused
MAX_SENDERS = 1024
MAX_COUNTER = (1 << 64) - 1

_HEADER = Struct("!4s8sQQ")  # magic, sender, epoch, counter
OVERHEAD_BYTES = _HEADER.size + TAG_BYTES


class SealError(FrameError):
    """A datagram that is not let in."""


class Opened(NamedTuple):
    sender: str
    epoch: int
    counter: int
    payload: bytes


class Sealer:
    """Seals what this node sends. A new epoch starts a new count."""

    def __init__(self, cluster_key: bytes, *, node_id: str, epoch: int) -> None:
        self._enc, self._tag = _keyed(cluster_key)
        self._sender = bytes.fromhex(node_id)
        self._epoch = epoch
        self._counter = 0

    def raise_epoch(self, epoch: int) -> None:
        if epoch <= self._epoch:
            raise ValueError("an epoch only grows: nonces must not repeat")
        self._epoch, self._counter = epoch, 0

    def seal(self, payload: bytes) -> bytes:
        self._counter += 1
        header = _HEADER.pack(MAGIC, self._sender, self._epoch, self._counter)
        sealed = header + _stream(self._enc, header[len(MAGIC) :], payload)
        return sealed + self._tag(sealed)


@dataclass
class _Window:
    """Which of the last WINDOW counters were seen: bit i of `seen` is newest - i."""

    newest: int = 0
    seen: int = 0

    def admit(self, counter: int) -> str:
        """An empty string, or why not."""
        ahead = counter - self.newest
        if ahead > 0:
            self.seen = 1 if ahead >= WINDOW else ((self.seen << ahead) | 1) & ((1 << WINDOW) - 1)
            self.newest = counter
            return ""
        if -ahead >= WINDOW:
            return "too-old"
        if self.seen >> -ahead & 1:
            return "replayed"
        self.seen |= 1 << -ahead
        return ""


@dataclass
class _Sender:
    floor: int = -1  # lives up to this one are refused: their windows are forgotten
    windows: dict[int, _Window] = field(default_factory=dict)

    def window(self, epoch: int) -> _Window | None:
        if epoch <= self.floor:
            return None
        if epoch not in self.windows:
            self.windows[epoch] = _Window()
            if len(self.windows) > MAX_EPOCHS_PER_SENDER:
                self.floor = min(self.windows)
                del self.windows[self.floor]
        return self.windows.get(epoch)


class Opener:
    """Opens what members sealed, each datagram once. `counts` has every reason for which one was refused."""

    def __init__(self, cluster_key: bytes, *, node_id: str) -> None:
        self._enc, self._tag = _keyed(cluster_key)
        self._own_id = node_id
        self._senders: dict[str, _Sender] = {}
        self.counts: Counter[str] = Counter()

    def open(self, datagram: bytes) -> Opened:
        """Raises SealError. Nothing is remembered of a datagram whose tag is wrong."""
        try:
            opened = self._open(datagram)
        except SealError as error:
            self.counts[error.reason] += 1
            raise
        self.counts["opened"] += 1
        return opened

    def _open(self, datagram: bytes) -> Opened:
        if len(datagram) < OVERHEAD_BYTES:
            raise SealError(f"{len(datagram)} bytes are no sealed datagram", reason="too-short")
        magic, sender_bytes, epoch, counter = _HEADER.unpack_from(datagram)
        if magic != MAGIC:
            raise SealError("a datagram of another protocol or version", reason="wrong-magic")
        sealed, tag = datagram[:-TAG_BYTES], datagram[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(sealed)):
            raise SealError("a datagram whose tag is wrong", reason="wrong-tag")
        sender = sender_bytes.hex()
        if sender == self._own_id:
            raise SealError("a datagram of our own came back", reason="own-echo")
        self._admit(sender, epoch, counter)
        payload = _stream(self._enc, sealed[len(MAGIC) : _HEADER.size], sealed[_HEADER.size :])
        return Opened(sender, epoch, counter, payload)

    def _admit(self, sender: str, epoch: int, counter: int) -> None:
        known = self._senders.get(sender)
        if known is None:
            if len(self._senders) >= MAX_SENDERS:
                raise SealError("more senders than a cluster can have", reason="too-many-senders")
            known = self._senders[sender] = _Sender()
        window = known.window(epoch)
        if window is None:
            raise SealError(f"a datagram from a forgotten life of {sender}", reason="forgotten-epoch")
        if refusal := window.admit(counter):
            raise SealError(f"datagram {counter} of {sender} is {refusal}", reason=refusal)


def _keyed(cluster_key: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The cipher's key, and what gives the tag of its argument."""
    keyed = hashlib.blake2b(key=derive(cluster_key, "udp mac"), digest_size=TAG_BYTES)

    def tag(data: bytes) -> bytes:
        mac = keyed.copy()  # half the cost of taking in the key each time
        mac.update(data)
        return mac.digest()

    return derive(cluster_key, "udp enc"), tag


def _stream(key: bytes, nonce: bytes, data: bytes) -> bytes:
    stream = hashlib.shake_256(key + nonce).digest(len(data))
    return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")
