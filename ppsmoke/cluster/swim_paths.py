"""How a peer can be reached: round-trip times, the open link, and whether datagrams get through. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppsmoke.cluster.swim_state import Config, Via


@dataclass
class Path:
    """All times are own time, in microseconds; None: never."""

    link: bool = False
    udp_blocked: bool = False
    udp_heard: int | None = None  # a datagram of its arrived
    udp_answered: int | None = None  # a datagram of ours was answered by one
    udp_unanswered_since: int | None = None  # first probe by datagram since then
    hears_us: bool = False  # it says that datagrams of ours arrive
    srtt: int | None = None
    rttvar: int = 0
    answered_at: int | None = None  # our last unasked answer to it

    def sample(self, rtt: int) -> None:
        """RFC 6298's estimator in whole microseconds."""
        if self.srtt is None:
            self.srtt, self.rttvar = rtt, rtt // 2
            return
        self.rttvar += (abs(rtt - self.srtt) - self.rttvar) // 4
        self.srtt += (rtt - self.srtt) // 8

    def timeout(self, config: Config) -> int:
        """For one direct probe."""
        if self.srtt is None:
            return config.timeout_max
        return min(config.timeout_max, max(config.timeout_min, self.srtt + 4 * self.rttvar))

    def via(self) -> Via:
        """For what is told once: the link, until UDP has been seen to work both ways, and when it no longer does."""
        return "link" if self.link and (self.udp_blocked or self.udp_answered is None) else "udp"

    def pinged_by_udp(self, now: int) -> None:
        if self.udp_unanswered_since is None:
            self.udp_unanswered_since = now

    def acked_by_udp(self, now: int) -> None:
        self.udp_answered, self.udp_unanswered_since = now, None

    def udp_lost(self, now: int, config: Config) -> Literal["from", "to", "both"] | None:
        """Called when only the link answered. Which direction is blocked, once it has lasted."""
        since = self.udp_unanswered_since
        if not self.link or since is None or now - since < config.udp_silence:
            return None
        hear_it = self.udp_heard is not None and now - self.udp_heard < config.udp_silence
        if hear_it:
            return "to"
        return "from" if self.hears_us else "both"

    def hears_udp(self, now: int, config: Config) -> bool:
        return self.udp_heard is not None and now - self.udp_heard < config.udp_fresh
