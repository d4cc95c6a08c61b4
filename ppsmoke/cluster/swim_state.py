"""What SWIM knows and asks for: states, settings, commands, events, and the arithmetic of patience. Pure.

All times are whole microseconds; `now` is a number that the driver passes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

SECOND = 1_000_000  # microseconds
MILLISECOND = 1_000

Via = Literal["udp", "link"]


class State(IntEnum):
    """In the order of precedence at one (epoch, incarnation)."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """Parameters for 3 to 20 nodes over the internet; times in microseconds."""

    probe_period: int = SECOND  # times (local health + 1); the load of one node is about two packets a period
    timeout_min: int = 400 * MILLISECOND  # of a direct probe; below it, jitter alone looks like loss
    timeout_max: int = 3 * SECOND  # also the time-out towards a peer whose round trip is not known yet
    verdict_timeouts: int = 3  # a probe is failing after this many time-outs: room for indirect pings and the link
    doubt: int = 1500 * MILLISECOND  # then it may still be answered this long; counts as a part of the suspicion
    indirect_probes: int = 3  # helpers asked when a direct probe is late
    suspicion_min: int = 10 * SECOND  # times max(1, log10(n - 1)); hosts that load a model freeze for 3 to 12 s
    suspicion_max_factor: int = 3  # of the minimum, while nobody confirms
    confirmations_max: int = 8  # independent accusers that bring patience down to the minimum
    patience_percent: int = 150  # of all this, for everybody, where an accusation was proved wrong lately
    patience_memory: int = 600 * SECOND  # how long "lately" is
    health_max: int = 7  # Lifeguard's local health: 0 is well
    lag_limit: int = SECOND  # an own timer that is later than this means that we were frozen
    wake_grace: int = SECOND  # after a freeze: what waited in the sockets is read before anybody is judged
    gossip_period: int = 200 * MILLISECOND
    gossip_nodes: int = 3
    retransmit_factor: int = 4  # each update is sent this many times ceil(log10(n + 1))
    sync_period: int = 10 * SECOND  # push/pull with one random member
    digest_patience: int = 2 * SECOND  # views that differ for longer are synchronised at once
    dead_ping_period: int = 5 * SECOND  # one dead member is told of its death; one that left is asked if it is back
    dead_gossip: int = 60 * SECOND  # the lately dead still get gossip
    dead_memory: int = 24 * 3600 * SECOND
    join_period: int = SECOND
    udp_silence: int = 10 * SECOND  # link works, no datagram for this long: UDP counts as blocked
    udp_fresh: int = 15 * SECOND  # "I hear your datagrams" on our packets means: one within this time
    lately_heard: int = 2 * SECOND  # whoever spoke to us within this time is not dead, whatever others say
    answer_period: int = SECOND  # unasked answers (your epoch is old, you are accused, who are you) to one peer
    epoch_ahead_max: int = 36_600 * 86_400_000  # milliseconds: a century; clocks may be wrong, beyond it is a lie
    udp: bool = True  # False: there is no UDP socket, all goes over links
    max_members: int = 256
    payload_limit: int = 1156  # bytes; with the seal's 44 a datagram of 1,200: no path fragments it


class Send(NamedTuple):
    """Bytes for a peer. `link` falls back to nothing, `udp` to the link where the driver knows no address."""

    to: str
    payload: bytes
    via: Via


class Timer(NamedTuple):
    """Call on_timer(at or later, token)."""

    at: int
    token: int


class MemberChanged(NamedTuple):
    """A member is new (old is None), or changed its state or its life. by: who said so."""

    node_id: str
    old: State | None
    new: State
    epoch: int
    incarnation: int
    by: str


class NameChanged(NamedTuple):
    """A name has a new best entry, or lost one."""

    name: str


class NameLost(NamedTuple):
    """Another owner's entry for a name of ours ranks higher (a later assignment generation, as a rule)."""

    name: str
    owner: str
    generation: int


class UdpBlocked(NamedTuple):
    """Datagrams do not pass while the link does. direction: "from" the peer to us, from us "to" it, or "both"."""

    node_id: str
    direction: Literal["from", "to", "both"]


class UdpRestored(NamedTuple):
    node_id: str


class Refuted(NamedTuple):
    """We were accused, or slept, and said that we live."""

    incarnation: int
    accuser: str


class EpochRaised(NamedTuple):
    """A peer remembered a later life of ours (our clock went back over a restart); we continue above it."""

    epoch: int


class Woke(NamedTuple):
    """Our own timers were late: this process, or this machine, stood still."""

    frozen: int  # microseconds


Event = MemberChanged | NameChanged | NameLost | UdpBlocked | UdpRestored | Refuted | EpochRaised | Woke
Command = Send | Timer | Event


def suspicion_bounds(config: Config, *, size: int, patient: bool) -> tuple[int, int]:
    """Least and greatest time from accusation to death in a cluster of `size` members, us included: it grows with the
    number of those who can vouch for the accused, which is all but itself."""
    least = round(config.suspicion_min * max(1.0, math.log10(max(size - 1, 1))) / MILLISECOND) * MILLISECOND
    if patient:
        least = least * config.patience_percent // 100
    return least, least * config.suspicion_max_factor


def confirmations_wanted(config: Config, *, size: int) -> int:
    """Accusers besides the first that bring the time down to the least. Everybody but the accused and the first
    accuser can confirm, so small clusters want fewer; in a cluster of two nobody can, and patience stays greatest."""
    return max(0, min(config.confirmations_max, size - 2))


def suspicion_time(least: int, greatest: int, *, confirmations: int, wanted: int) -> int:
    """Time from the first accusation to death. Lifeguard, arXiv 1707.00788, section IV-B, whole milliseconds."""
    if wanted <= 0:
        return greatest
    share = math.log(confirmations + 1) / math.log(wanted + 1)
    return max(least, round((greatest - share * (greatest - least)) / MILLISECOND) * MILLISECOND)


def retransmissions(config: Config, *, size: int) -> int:
    """How often an update is sent by each member before it rests."""
    return config.retransmit_factor * max(1, math.ceil(math.log10(size + 1)))
