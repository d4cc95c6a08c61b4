"""How long a link waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkTiming:
    """facts/network.md, sections 4.2 and 4.6."""

    connect_s: float = 5.0
    handshake_s: float = 10.0  # preamble, TLS, HELLO and READY together
    ping_after_s: float = 5.0  # of silence
    answer_s: float = 2.0  # to a ping, if two usual round trips are not longer: then another link is dialled beside it
    down_after_s: float = 15.0  # without a byte
    bye_s: float = 2.0  # reading on after a BYE, so that no RST takes it from the peer
    redial_s: float = 0.5  # pauses between dials: full jitter below a ceiling that doubles from here,
    redial_most_s: float = 8.0  # up to here
