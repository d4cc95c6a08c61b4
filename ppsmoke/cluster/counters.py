"""What a node has refused, by name, and the line that tells a person of it.

A name is "<where>.<what>"; where is door (accepted sockets before TLS), handshake (TLS to READY), link, relay, hole,
datagram or gossip. What is not in REFUSALS happens to honest nodes too and is only counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

REPORT_EVERY_S = 10.0
ALARM_AT = 100  # everyday refusals between two reports: beyond it, it is a flood
COPIES = "datagram.replayed"  # a member that does not know our address yet sends to several: these are a flood later
COPIES_ALARM_AT = 2000
MAX_NAMED = 6  # in one line, the most first

# Whoever is on the internet can cause these, and a scanner that passes by or a slow network does.
EVERYDAY: dict[str, str] = {
    "door.wrong-preamble": "connections without this cluster's key",
    "door.other-protocol": "connections of another protocol version",
    "door.too-slow": "connections that did not say who they are in time",
    "door.evicted": "connections dropped because too many said nothing",
    "door.replayed": "connections that repeated somebody's preamble",
    "door.wrong-target": "connections meant for another node",
    "door.handshake-evicted": "handshakes dropped because too many were going on",
    "door.handshake-too-slow": "handshakes that were not over in time",
    "relay.bad-token": "relay legs with a token that is not, or no longer, good",
    "datagram.too-short": "datagrams that are too short",
    "datagram.wrong-magic": "datagrams of another protocol",
    "datagram.wrong-tag": "datagrams without this cluster's key",
    "datagram.replayed": "datagrams that had come before",
    "datagram.too-old": "datagrams that were too old",
    "datagram.forgotten-epoch": "datagrams of a forgotten life of their sender",
}
# Never chance: a member's doing, or of somebody who has a member's key or sits on the way.
SERIOUS: dict[str, str] = {
    "handshake.wrong-certificate": "handshakes with a certificate that is none of this run's",
    "handshake.no-certificate": "handshakes without a certificate",
    "handshake.wrong-node": "handshakes of a node that claimed to be another",
    "handshake.bad-frame": "handshakes with bytes that are none of ours",
    "link.tampered": "links ended by bytes that were changed on the way",
    "link.bad-frame": "links ended by a frame that is none of ours",
    "link.bad-data": "links ended by an impossible message",
    "link.bad-ack": "links ended by an impossible acknowledgement",
    "link.bad-signal": "links ended by a signal that does not decode",
    "link.bad-carry": "links ended by a datagram without an address",
    "link.over-window": "links ended because more came than was asked for",
    "link.unread": "links ended because the other side asks and does not read",
    "link.junk-mailbox": "messages to mailboxes that nobody asked for",
    "link.false-name": "names claimed without the right to them",
    "link.too-many-tokens": "relay tokens beyond the bound",
    "hole.repeated-probe": "probes that came twice",
    "datagram.too-many-senders": "datagrams of more senders than a cluster can have",
    "gossip.implausible-epoch": "claims of a life that cannot be",
    "gossip.too-many-members": "members beyond the bound",
    "gossip.too-many-names": "names beyond the bound",
    "gossip.truncated": "membership packets that end early",
    "gossip.oversized": "membership packets with a field that is too long",
    "gossip.unknown-kind": "membership packets of an unknown kind",
    "gossip.unknown-flags": "membership packets with unknown flags",
    "gossip.unknown-state": "membership packets with an unknown state",
    "gossip.unknown-update": "membership packets with an unknown update",
    "gossip.bad-name": "membership packets with a name that is no text",
}
REFUSALS = EVERYDAY | SERIOUS


def summed(parts: Iterable[tuple[str, Counter[str]]]) -> Counter[str]:
    """What each part, a where and its counts, has counted, under full names."""
    total: Counter[str] = Counter()
    for where, counts in parts:
        for what, count in counts.items():
            if count:
                name = f"{where}.{what}"
                total[name] = total.get(name, 0) + count
    return total


class Watch:
    """Tells what was refused since it last told; called now and then, so that no flood becomes a flood of lines."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: dict[str, int] = {}

    def tell(self, counts: Counter[str]) -> None:
        """One line if anything was refused: a warning for what is serious and for a flood, else for who looks."""
        refused = {name: count for name, count in counts.items() if name in REFUSALS}
        risen = {name: count - told for name, count in refused.items() if count > (told := self._told.get(name, 0))}
        self._told = refused
        if not risen:
            return
        copies = risen.get(COPIES, 0)
        flood = copies >= COPIES_ALARM_AT or sum(risen.values()) - copies >= ALARM_AT
        alarming = flood or any(name in SERIOUS for name in risen)
        most = sorted(risen, key=lambda name: (-risen[name], name))
        parts = [f"{risen[name]:,} {REFUSALS[name]}" for name in most[:MAX_NAMED]]
        if len(most) > MAX_NAMED:
            parts.append(f"{len(most) - MAX_NAMED} more kinds")
        self._log.log(logging.WARNING if alarming else logging.INFO, "refused: %s", "; ".join(parts))
