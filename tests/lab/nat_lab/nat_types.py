"""The address translators and firewalls of the lab: what each does, in the terms of RFC 4787 and RFC 5382."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ports = Literal["own", "preserved", "per-port", "per-address", "per-connection"]
Unsolicited = Literal["accept", "drop", "reject"]


@dataclass(frozen=True, kw_only=True)
class NatType:
    """What stands between a host and the internet.

    ports: the public port of a connection. "own": the host has a public address itself; "preserved": the host's own
        port; "per-port": a random one for each port of the host, whoever it talks to; "per-address": a random one for
        each port and each address talked to; "per-connection": a random one each time.
    unsolicited: what becomes of a packet from outside that belongs to no connection and to no mapped port; "reject"
        answers a SYN with RST.
    """

    ports: Ports
    unsolicited: Unsolicited

    @property
    def translates(self) -> bool:
        return self.ports != "own"

    @property
    def endpoint_independent(self) -> bool:
        """Whether all the world sees one port of the host under the same public port: RFC 4787, section 4.1."""
        return self.ports in ("own", "preserved", "per-port")


NAT_TYPES = {
    "open": NatType(ports="own", unsolicited="accept"),
    "firewall-drop": NatType(ports="own", unsolicited="drop"),
    "firewall-reject": NatType(ports="own", unsolicited="reject"),
    "nat-preserving": NatType(ports="preserved", unsolicited="drop"),
    "nat-reject": NatType(ports="preserved", unsolicited="reject"),
    "nat-shifting": NatType(ports="per-port", unsolicited="drop"),
    "nat-random": NatType(ports="per-address", unsolicited="drop"),
    "nat-fully-random": NatType(ports="per-connection", unsolicited="drop"),
}
