"""Which way to a peer, in which order, and when to look for a better one. Pure: `now` is an argument.

Direct beats punched beats relayed. A link starts on the first path that works; whatever is not direct is tried to be
replaced, at moments that get rarer. facts/network.md, sections 4.1, 4.5 and 4.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.handshake import LinkKind

STAGGER_S = 0.25  # between the attempts of one race (RFC 8305, and 4.6)
RELAY_AFTER_S = 1.0  # a relay leg gives direct dials this much of a start
MAX_RELAYS = 3  # asked at once
ROUNDS_S = (0.0, 5.0, 20.0)  # after a link that is not direct came up: when to try for a better one
LATER_S = 60.0  # then again so often, by direct dials alone: a hole that three rounds did not open stays shut
YOUNG_S = 30.0  # a punched link that lives shorter than this was not worth its hole
PUNCH_BAN_S = 300.0


@dataclass(frozen=True)
class Attempt:
    """A direct dial to a candidate, or by way of a relay (its node id): a leg through it, or a hole it arranges."""

    kind: LinkKind
    after_s: float  # after the race's start; earlier if all that began before have failed
    candidate: Candidate | None = None
    relay: str = ""


def candidates_in_order(
    told: Candidate | None, said: Sequence[Candidate], gossiped: Sequence[Candidate]
) -> list[Candidate]:
    """Where to dial a peer, each socket once: where somebody told us, then its own host's addresses (two containers on
    one machine reach each other there alone), then mapped ones."""
    found = [told] if told is not None else []
    for kind in ("host", "mapped"):
        found += [candidate for candidate in (*said, *gossiped) if candidate.kind == kind]
    unique: dict[tuple[str, int], Candidate] = {}
    for candidate in found:
        unique.setdefault((candidate.host, candidate.tcp_port), candidate)
    return list(unique.values())


def first_link(candidates: Sequence[Candidate], relays: Sequence[str]) -> list[Attempt]:
    """The race for a link where there is none; relays: those that may have a link to the peer, the best first."""
    direct = direct_dials(candidates)
    start_s = RELAY_AFTER_S if direct else 0.0
    legs = [
        Attempt(LinkKind.RELAYED, start_s + number * STAGGER_S, relay=relay)
        for number, relay in enumerate(relays[:MAX_RELAYS])
    ]
    return sorted(direct + legs, key=lambda attempt: attempt.after_s)


def better_link(candidates: Sequence[Candidate], *, relay: str | None) -> list[Attempt]:
    """The race for a better link than a relayed one (relay: who may arrange a hole), or than a punched one (None)."""
    punch = [Attempt(LinkKind.PUNCHED, 0.0, relay=relay)] if relay is not None else []
    return punch + direct_dials(candidates)


def direct_dials(candidates: Sequence[Candidate]) -> list[Attempt]:
    return [
        Attempt(LinkKind.DIRECT, number * STAGGER_S, candidate=candidate) for number, candidate in enumerate(candidates)
    ]


class Upgrades:
    """For one peer: when to try for a better path than the one that its link has."""

    def __init__(self) -> None:
        self.note = ""  # why there is no better one
        self._kind: LinkKind | None = None
        self._up_at = 0.0
        self._round = 0
        self._no_punch_until = 0.0

    def linked(self, kind: LinkKind, now: float) -> None:
        """The link has this kind of path from now on."""
        if kind is not self._kind:
            self._round, self._up_at = 0, now
            if kind is not LinkKind.RELAYED:
                self.note = ""
        self._kind = kind

    def lost(self, now: float) -> None:
        """The link is gone."""
        if self._kind is LinkKind.PUNCHED and now - self._up_at < YOUNG_S:
            self._no_punch_until = max(self._no_punch_until, now + PUNCH_BAN_S)
        self._kind = None

    def restarted(self) -> None:
        """The peer is in a new life: that the links to the old one ended says nothing about holes."""
        if self._no_punch_until != float("inf"):
            self._no_punch_until = 0.0

    def due_in_s(self, now: float) -> float | None:
        """Until the next round; None: there is nothing to improve."""
        if self._kind is None or self._kind is LinkKind.DIRECT:
            return None
        return max(0.0, self._due_at() - now)

    def begin(self, now: float) -> bool:
        """A round begins; whether a hole may be tried in it."""
        self._round += 1
        return self._kind is LinkKind.RELAYED and self._round <= len(ROUNDS_S) and now >= self._no_punch_until

    def no_punch(self, reason: str, *, for_good: bool) -> None:
        self.note = reason
        if for_good:
            self._no_punch_until = float("inf")

    def _due_at(self) -> float:
        rounds = len(ROUNDS_S)
        first = 1 if self._kind is LinkKind.PUNCHED else 0  # at the very moment of a hole there was no direct way
        number = self._round + first
        return self._up_at + (ROUNDS_S[number] if number < rounds else ROUNDS_S[-1] + (number - rounds + 1) * LATER_S)


@dataclass(frozen=True)
class Mapping:
    """What a relay saw of one side's fresh port: from where it came to its first port, and to its second (None: there
    was no second, or the probe did not come)."""

    local_port: int
    first: tuple[str, int]
    second: tuple[str, int] | None

    @property
    def keeps_its_port(self) -> bool:
        return self.first[1] == self.local_port


def why_no_hole(name: str, mapping: Mapping) -> str:
    """ "" if this side's next connection can be expected to come from the port that was seen; else why not."""
    if mapping.second is None:
        if mapping.keeps_its_port:
            return ""
        return (
            f"the NAT of {name} changed the port, and no second relay port could tell whether it always does so alike"
        )
    if mapping.first == mapping.second:
        return ""
    if mapping.first[0] != mapping.second[0]:
        return f"the NAT of {name} uses another address per destination"
    return f"the NAT of {name} uses another port per destination"


def start_delays_us(one_rtt_us: int, other_rtt_us: int) -> tuple[int, int]:
    """How long each side waits after the relay's word came, so that both start together."""
    most = max(one_rtt_us, other_rtt_us)
    return (most - one_rtt_us) // 2, (most - other_rtt_us) // 2


def unreachable(
    name: str, last_error: str, *, candidates: Sequence[Candidate], own: Sequence[Candidate]
) -> tuple[str, str]:
    """Cause and hint for what no path leads to: which side must change what.

    candidates: where it can be dialled, as far as known; own: mapped addresses of this machine."""
    if candidates:
        cause = f"{name} cannot be reached: nobody answers at {_listed(candidates)}"
    else:
        cause = f"{name} cannot be reached: no port of theirs is known that could be dialled"
    cause += (
        f", nobody came to this machine at {_listed(own)}" if own else ", this machine has no forwarded port either"
    )
    cause += ", and no node that both can reach could relay"
    if last_error and last_error != "no link yet":
        cause += f" ({last_error})"
    remedies = ["rent that stage with a direct (mapped) TCP port"]
    if own:
        remedies.append("see why what is forwarded to this machine does not arrive")
    else:
        remedies.append("forward a TCP port of your router to this machine")
    return cause, ", or ".join(remedies)


def _listed(candidates: Sequence[Candidate]) -> str:
    return ", ".join(f"{one.host}:{one.tcp_port}" for one in candidates)
