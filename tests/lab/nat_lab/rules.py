"""A router's nftables rules, as text, from what the router is to be. Nothing here touches a kernel."""

from __future__ import annotations

import random

from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Host, Site

SHIFTED_PORTS = 2048  # so many public ports a "per-port" or "per-address" translator draws from
LOWEST_SHIFTED_PORT, HIGHEST_SHIFTED_PORT = 20000, 60000
TABLE = "lab"


def ruleset(site: Site, hosts: list[Host], *, seed: int) -> str:
    """The whole of a router's rules, replacing what was there. seed: of the ports that are drawn at random."""
    mapped = [host for host in hosts if host.mapped_tcp is not None]
    return "\n".join(
        [
            "flush ruleset",
            f"table ip {TABLE} {{",
            *_chain("incoming", "nat hook prerouting priority dstnat; policy accept", _to_mapped(site, mapped)),
            *_chain("outgoing", "nat hook postrouting priority srcnat; policy accept", _translation(site, hosts, seed)),
            *_chain("passing", "filter hook forward priority filter; policy drop", _passing(site, mapped)),
            *_chain("own", "filter hook input priority filter; policy drop", _own(site)),
            "}",
            "",
        ]
    )


def _chain(name: str, hook: str, rules: list[str]) -> list[str]:
    return [f"  chain {name} {{", f"    type {hook};", *(f"    {rule}" for rule in rules), "  }"]


def _to_mapped(site: Site, mapped: list[Host]) -> list[str]:
    if not site.type.translates:
        return []
    from_where = "" if site.hairpin == "works" else 'iifname "wan" '
    rules = []
    for host in mapped:
        to = f"{from_where}ip daddr {host.public}"
        rules.append(f"{to} tcp dport {host.mapped_tcp} dnat to {host.own}:{TCP_PORT}")
        rules.append(f"{to} udp dport {host.mapped_udp} dnat to {host.own}:{UDP_PORT}")
    return rules


def _translation(site: Site, hosts: list[Host], seed: int) -> list[str]:
    if not site.type.translates:
        return []
    # Hairpin: the neighbour must answer to the router, which alone knows how to translate back.
    rules = ['iifname "lan*" oifname "lan*" ct status dnat masquerade']
    match site.type.ports:
        case "preserved":
            rules.append('oifname "wan" masquerade')
        case "per-connection":
            rules.append('oifname "wan" masquerade random,fully-random')
        case "per-port":
            rules += _drawn(hosts[0].public, "", seed)
        case "per-address":
            rules += _drawn(hosts[0].public, " . ip daddr", seed)
    return rules


def _drawn(public: str, also_by: str, seed: int) -> list[str]:
    """The public port by a hash of the host's port (and of more); the hash picks from ports drawn once."""
    draw = random.Random(seed)
    ports = draw.sample(range(LOWEST_SHIFTED_PORT, HIGHEST_SHIFTED_PORT), SHIFTED_PORTS)
    table = ", ".join(f"{place} : {port}" for place, port in enumerate(ports))
    rules = []
    for protocol in ("tcp", "udp"):
        place = f"jhash ip saddr . {protocol} sport{also_by} mod {SHIFTED_PORTS} seed {draw.getrandbits(31):#x}"
        rules.append(f'oifname "wan" meta l4proto {protocol} snat to {public}:{place} map {{ {table} }}')
    return [*rules, 'oifname "wan" masquerade']


def _passing(site: Site, mapped: list[Host]) -> list[str]:
    rules = ["meta l4proto udp drop"] if site.udp == "blocked" else []
    rules += ["ct state established,related accept", 'iifname "lan*" oifname "wan" accept']
    if site.neighbours == "routed":
        rules.append('iifname "lan*" oifname "lan*" accept')
    if site.type.translates:
        rules.append("ct status dnat accept")
    else:
        for host in mapped:
            rules.append(f"ip daddr {host.own} tcp dport {TCP_PORT} accept")
            rules.append(f"ip daddr {host.own} udp dport {UDP_PORT} accept")
    if site.type.unsolicited == "accept":
        rules.append('iifname "wan" accept')
    return rules + _rejection(site)


def _own(site: Site) -> list[str]:
    """What reaches the router itself. Without these a stray packet from outside would take the public port that it is
    sent to: the router keeps an entry for it, and moves our own later packet to another port."""
    echo = "icmp type { echo-request, destination-unreachable, time-exceeded } accept"
    return ["ct state established,related accept", echo, *_rejection(site)]


def _rejection(site: Site) -> list[str]:
    return ['iifname "wan" meta l4proto tcp reject with tcp reset'] if site.type.unsolicited == "reject" else []
