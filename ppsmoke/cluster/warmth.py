"""How many filler frames keep TCP's window as wide as the messages of late need it. Pure: `now` is an argument.

Linux halves an idle connection's congestion window once per retransmission time-out, down to ten packets; a connection
that sends little counts as idle all the same: its window shrinks towards what it uses. The window counts packets, not
bytes, so that a burst of tiny ones holds it open (tcp_cwnd_validate, tcp_cwnd_application_limited in net/ipv4).
"""

from __future__ import annotations

PACKET_BYTES = 1400
INITIAL_PACKETS = 10  # RFC 6928: no idle connection gets less
MOST_PACKETS = 64  # held open at most: 90 KB in one round trip
BURST_EVERY_S = 0.19  # within the least retransmission time-out, 0.2 s and a round trip
REMEMBER_S = 5.0  # a larger message counts for so long


class Warmth:
    def __init__(self) -> None:
        self._packets = 0  # of the largest message of late
        self._noted_at = 0.0
        self._burst_at = 0.0

    def note(self, count: int, now: float) -> None:
        """So many bytes went out at once."""
        packets = min(MOST_PACKETS, -(-count // PACKET_BYTES))
        if packets >= self._packets or now - self._noted_at > REMEMBER_S:
            self._packets, self._noted_at = packets, now

    @property
    def is_needed(self) -> bool:
        """Whether a message of late is larger than what an idle connection takes at once anyway."""
        return self._packets >= INITIAL_PACKETS

    def fillers_due(self, now: float) -> int:
        """How many to send at this tick."""
        if not self.is_needed:
            return 0
        if now - self._burst_at < BURST_EVERY_S:
            return 1
        self._burst_at = now
        return self._packets * 5 // 4  # with a message right behind it, it must fit into the window still
