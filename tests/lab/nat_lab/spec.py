"""What a lab consists of, and the addresses that follow from it: sites on the internet, hosts behind their routers.

Every site has a router with a cable to the internet. Behind a translating router hosts have private addresses and share
one public address; behind any other each has a public address of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.lab.nat_lab.expected import HOME, NODES, STAGE_0, STAGE_1, Cell
from tests.lab.nat_lab.nat_types import NAT_TYPES, NatType

TCP_PORT, UDP_PORT = 7070, 7071  # where a node listens, as in a rented container
MAPPED_TCP_PORT, MAPPED_UDP_PORT = 41070, 42070  # plus the host's place in its site: the same ports, seen from outside
MAX_SITES, MAX_HOSTS = 24, 8

Neighbours = Literal["routed", "isolated"]
Hairpin = Literal["none", "works"]
Udp = Literal["passes", "blocked"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A router and the hosts behind it; the site is called like its first host.

    mapped: hosts whose TCP_PORT and UDP_PORT can be reached from outside (behind a firewall: the same ports, opened).
    hairpin: whether a mapped port can be reached from inside by the public address.
    neighbours: whether the hosts behind this router reach each other.
    """

    hosts: tuple[str, ...]
    nat: str = "open"
    mapped: frozenset[str] = field(default_factory=frozenset)
    udp: Udp = "passes"
    hairpin: Hairpin = "none"
    neighbours: Neighbours = "routed"

    def __post_init__(self) -> None:
        if self.nat not in NAT_TYPES:
            raise ValueError(f"{self.nat!r} is none of {', '.join(NAT_TYPES)}")
        if not 0 < len(self.hosts) <= MAX_HOSTS or not self.mapped <= set(self.hosts):
            raise ValueError(f"{self.hosts}: 1 to {MAX_HOSTS} hosts, and only these can be mapped")

    @property
    def name(self) -> str:
        return self.hosts[0]

    @property
    def type(self) -> NatType:
        return NAT_TYPES[self.nat]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a host is. own: the address it has itself; public: the one it is seen under; mapped_*: ports of the public
    address that lead to TCP_PORT and UDP_PORT, None where there are none."""

    name: str
    site: str
    index: int
    own: str
    gateway: str
    public: str
    mapped_tcp: int | None
    mapped_udp: int | None


class Plan:
    """The addresses of a lab's sites; a pure function of their order."""

    def __init__(self, sites: Sequence[Site]) -> None:
        names = [host for site in sites for host in site.hosts]
        if len(set(names)) != len(names) or not 0 < len(sites) <= MAX_SITES:
            raise ValueError(f"1 to {MAX_SITES} sites, every host once, not {names}")
        self.sites: dict[str, Site] = {site.name: site for site in sites}
        self._numbers = {site.name: number for number, site in enumerate(sites, start=1)}
        self.site_of = {host: site.name for site in sites for host in site.hosts}

    def host(self, name: str) -> Host:
        site = self.sites[self.site_of[name]]
        number, index = self._numbers[site.name], site.hosts.index(name)
        lan = f"10.{number}.{index}"
        translates, mapped = site.type.translates, name in site.mapped
        public = self.router_address(site.name) if translates else f"203.0.113.{10 * number + 1 + index}"
        return Host(
            name=name,
            site=site.name,
            index=index,
            own=f"{lan}.2" if translates else public,
            gateway=f"{lan}.1",
            public=public,
            mapped_tcp=(MAPPED_TCP_PORT + index if translates else TCP_PORT) if mapped else None,
            mapped_udp=(MAPPED_UDP_PORT + index if translates else UDP_PORT) if mapped else None,
        )

    def hosts(self, site: str) -> list[Host]:
        return [self.host(name) for name in self.sites[site].hosts]

    def router_address(self, site: str) -> str:
        """The router's own address on the internet."""
        return f"203.0.113.{10 * self._numbers[site]}"

    def addresses(self, site: str) -> list[str]:
        """Every address that the internet must send to this site's cable. Those of hosts are there for any type: a site
        may change its type."""
        number = self._numbers[site]
        hosts = range(len(self.sites[site].hosts))
        return [self.router_address(site), *(f"203.0.113.{10 * number + 1 + index}" for index in hosts)]

    def with_site(self, changed: Site) -> Plan:
        """The same plan after a change of one site's nature; its hosts stay."""
        if self.sites[changed.name].hosts != changed.hosts:
            raise ValueError(f"the hosts of {changed.name} cannot change")
        return Plan([changed if name == changed.name else site for name, site in self.sites.items()])


def sites_of(cell: Cell) -> list[Site]:
    """The sites of a cell of the expected table: home, and the stages, behind one router where they are neighbours."""

    def one(*hosts: str, neighbours: Neighbours = "routed") -> Site:
        return Site(
            hosts=hosts,
            nat=cell.type_of(hosts[0]),
            mapped=cell.mapped & set(hosts),
            udp="blocked" if cell.udp_blocked & set(hosts) else "passes",
            neighbours=neighbours,
        )

    if cell.neighbours:
        return [one(HOME), one(STAGE_0, STAGE_1, neighbours=cell.neighbours)]
    return [one(node) for node in NODES]


def sites_from(types: Mapping[str, str], mapped: Sequence[str] = ()) -> list[Site]:
    """A site for each host: {"home": "open", "stage-0": "nat-preserving"}."""
    return [Site(hosts=(host,), nat=nat, mapped=frozenset({host} & set(mapped))) for host, nat in types.items()]
