"""What a node says of where it can be reached: in SWIM a member's meta holds its candidates."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.handshake import decode_candidates, encode_candidates
from ppsmoke.cluster.swim_packets import MAX_META_BYTES
from ppsmoke.errors import FrameError


def meta_of(candidates: Sequence[Candidate]) -> bytes:
    """As many of them, the first first, as a member's meta holds."""
    kept = list(candidates)
    while len(encoded := encode_candidates(kept)) > MAX_META_BYTES:
        kept.pop()
    return encoded


@functools.lru_cache(maxsize=256)  # asked for each packet to a member that was not heard from by UDP lately
def udp_candidates(meta: bytes) -> tuple[tuple[str, int], ...]:
    try:
        return tuple((one.host, one.udp_port) for one in decode_candidates(meta) if one.udp_port)
    except FrameError:
        return ()  # a member that lies about itself is reached over its link, or not at all


def outward_host(host: str) -> str:
    """The host itself, or for "all addresses" the one that a packet to the outside would leave from."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))  # sends nothing: the documentation's own addresses (RFC 5737, 3849)
            return probe.getsockname()[0]
        except OSError:
            return "::1" if host == "::" else "127.0.0.1"
