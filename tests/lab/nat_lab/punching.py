"""Between which routers does a simultaneous TCP open get through? Tried with bare sockets: what rule 3 rests on."""

from __future__ import annotations

from collections.abc import Sequence

from tests.lab.nat_lab.hand import Hand
from tests.lab.nat_lab.lab import NatLab
from tests.lab.nat_lab.nat_types import NAT_TYPES
from tests.lab.nat_lab.selftest import ARRIVAL_S, outcomes
from tests.lab.nat_lab.spec import Site

OBSERVER, OBSERVED_PORT = "observer", 9001
DELAY_MS = 100.0  # of each cable: two SYNs that leave within twice this of each other cross on the way
PUNCHED_TYPES = tuple(name for name, kind in NAT_TYPES.items() if kind.unsolicited != "accept")


def punchable(one: str, other: str) -> bool:
    """What the expected table says: both ports must be endpoint independent."""
    return NAT_TYPES[one].endpoint_independent and NAT_TYPES[other].endpoint_independent


def punch(types: Sequence[str] = PUNCHED_TYPES) -> dict[tuple[str, str], bool]:
    """Every type against every type, all at once: whether both ends got a connection."""
    left, right = ([Site(hosts=(f"{side}-{nat}",), nat=nat) for nat in types] for side in ("left", "right"))
    with NatLab([*left, *right, Site(hosts=(OBSERVER,))]) as lab:
        hands = {site.name: Hand(lab.node(site.name)) for site in (*left, *right)}
        observer = Hand(lab.node(OBSERVER))
        observer.listen("seen", OBSERVED_PORT)
        pairs = [(one, other) for one in left for other in right]
        places = {}
        for one, other in pairs:
            for me, peer in ((one, other), (other, one)):
                places[me.name, peer.name] = _observed(lab, hands[me.name], observer, peer.name)
        for site in (*left, *right):
            lab.edge(site.name).set(delay_ms=DELAY_MS)
        for one, other in pairs:
            for me, peer in ((one, other), (other, one)):
                (own_port, _), (_, seen) = places[me.name, peer.name], places[peer.name, me.name]
                hands[me.name].connect(f"to {peer.name}", seen, "hello", port=own_port)
        ends = [(me.name, peer.name) for pair in pairs for me, peer in (pair, pair[::-1])]
        begun = {(me, peer): (hands[me], f"to {peer}") for me, peer in ends}
        answering = {(me.name, peer.name) for pair in pairs if punchable(pair[0].nat, pair[1].nat)
                     for me, peer in (pair, pair[::-1])}  # fmt: skip
        came = outcomes(begun, answering)
        return {
            (one.nat, other.nat): came[one.name, other.name] == came[other.name, one.name] == "connected"
            for one, other in pairs
        }


def _observed(lab: NatLab, hand: Hand, observer: Hand, peer: str) -> tuple[int, tuple[str, int]]:
    """A fresh port of the hand's, and the public place that it was seen under."""
    name = f"rendezvous for {peer}"
    own_port = hand.connect(name, (lab.host(OBSERVER).public, OBSERVED_PORT), hand.name)
    if hand.outcome(name, ARRIVAL_S) != "connected":
        raise RuntimeError(f"{hand.name} does not reach the observer")
    _, host, port = observer.receive("seen", ARRIVAL_S)
    return own_port, (host, port)


def report(found: dict[tuple[str, str], bool]) -> tuple[str, bool]:
    """A matrix of what got through, "!" where it should not have, or should; and whether there is none of these."""
    types = list(dict.fromkeys(one for one, _ in found))
    width = max(map(len, types))
    lines = [" " * width + "  " + "  ".join(types)]
    for one in types:
        cells = []
        for other in types:
            mark = ("punched" if found[one, other] else "-") + (
                "" if found[one, other] == punchable(one, other) else "!"
            )
            cells.append(mark.ljust(len(other)))
        lines.append(f"{one:{width}}  " + "  ".join(cells))
    return "\n".join(lines), all(got == punchable(*pair) for pair, got in found.items())
