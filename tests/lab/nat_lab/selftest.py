"""Does each kind of router do what its name says? Measured from outside, with sockets, as RFC 4787 and 5382 ask."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

from tests.lab.nat_lab.hand import Hand
from tests.lab.nat_lab.lab import NatLab
from tests.lab.nat_lab.nat_types import NAT_TYPES
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Site

OBSERVERS = ("observer-a", "observer-b")  # two addresses of the internet
OBSERVED_PORTS = (9001, 9002)
ARRIVAL_S = 5.0  # for what must come; it takes a millisecond
SILENCE_S = 0.3  # for what must not come: two hundred times what it would take

Key = TypeVar("Key")
INDEPENDENT, BY_ADDRESS, BY_PORT = "endpoint-independent", "address-dependent", "address-and-port-dependent"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a router showed. mapping: RFC 4787, 4.1; filtering: RFC 4787, 5; unsolicited: what a SYN to an unmapped port
    met; mapped_*: what came of a dial to a mapped port; hairpin_*: the same from inside, without and with hairpin."""

    udp_mapping: str
    tcp_mapping: str
    ports_preserved: bool
    udp_filtering: str
    unsolicited: str
    mapped_tcp: str
    mapped_udp: str
    hairpin_off: str
    hairpin_on: str


def intended(nat: str) -> Behaviour:
    """What the type is defined to do."""
    kind = NAT_TYPES[nat]
    by_ports = {"per-address": BY_ADDRESS, "per-connection": BY_PORT}
    mapping = by_ports.get(kind.ports, INDEPENDENT)
    return Behaviour(
        udp_mapping=mapping,
        tcp_mapping=mapping,
        ports_preserved=kind.ports in ("own", "preserved"),
        udp_filtering=INDEPENDENT if kind.unsolicited == "accept" else BY_PORT,
        unsolicited={"accept": "connected", "drop": "silent", "reject": "refused"}[kind.unsolicited],
        mapped_tcp="connected",
        mapped_udp="arrived",
        hairpin_off="silent" if kind.translates else "connected",  # a public address is the host's own
        hairpin_on="connected",
    )


def measure(nats: Iterable[str]) -> dict[str, Behaviour]:
    """All of them at once, each behind a router of its own."""
    sites = [Site(hosts=(nat,), nat=nat) for nat in nats]
    with NatLab([*sites, *(Site(hosts=(name,)) for name in OBSERVERS)]) as lab:
        return _Measurement(lab, [site.name for site in sites]).run()


class _Measurement:
    """Each step begins for all the sites, so that a silence is waited for once."""

    def __init__(self, lab: NatLab, names: list[str]) -> None:
        self._lab = lab
        self._hands = {name: Hand(lab.node(name)) for name in names}
        self._observers = [Hand(lab.node(name)) for name in OBSERVERS]
        self._addresses = [lab.host(name).public for name in OBSERVERS]
        # Three places to talk to: one address with two ports, and another address.
        self._places = [(0, OBSERVED_PORTS[0]), (0, OBSERVED_PORTS[1]), (1, OBSERVED_PORTS[0])]

    def run(self) -> dict[str, Behaviour]:
        for observer, port in self._places:
            self._observers[observer].bind(f"udp {port}", port)
            self._observers[observer].listen(f"tcp {port}", port)
        udp, udp_kept = self._seen_udp()
        tcp, tcp_kept = self._seen_tcp()
        filtering, unsolicited = self._udp_filtering(), self._unsolicited()
        for name in self._hands:
            self._lab.rebuild(name, mapped=frozenset({name}))
        public = {name for name in self._hands if not NAT_TYPES[name].translates}
        mapped_tcp, mapped_udp, without = self._mapped_tcp(), self._mapped_udp(), self._hairpin(public)
        for name in self._hands:
            self._lab.rebuild(name, hairpin="works")
        with_hairpin = self._hairpin(set(self._hands))
        return {
            name: Behaviour(
                udp_mapping=_mapping(udp[name]),
                tcp_mapping=_mapping(tcp[name]),
                ports_preserved=udp_kept[name] and tcp_kept[name],
                udp_filtering=filtering[name],
                unsolicited=unsolicited[name],
                mapped_tcp=mapped_tcp[name],
                mapped_udp=mapped_udp[name],
                hairpin_off=without[name],
                hairpin_on=with_hairpin[name],
            )
            for name in self._hands
        }

    def _seen_udp(self) -> tuple[dict[str, list[int]], dict[str, bool]]:
        """From one socket to three places: the ports it was seen under."""
        own = {}
        for name, hand in self._hands.items():
            own[name] = hand.bind("u")
            for observer, port in self._places:
                hand.send("u", (self._addresses[observer], port), name)
        return self._collect("udp", own)

    def _seen_tcp(self) -> tuple[dict[str, list[int]], dict[str, bool]]:
        own = {}
        for name, hand in self._hands.items():
            own[name] = 0
            for place, (observer, port) in enumerate(self._places):
                own[name] = hand.connect(f"t{place}", (self._addresses[observer], port), name, port=own[name])
        for hand in self._hands.values():
            for place in range(len(self._places)):
                hand.outcome(f"t{place}", ARRIVAL_S)
        return self._collect("tcp", own)

    def _collect(self, protocol: str, own: dict[str, int]) -> tuple[dict[str, list[int]], dict[str, bool]]:
        seen: dict[str, list[int]] = {name: [] for name in own}
        for observer, port in self._places:
            for _ in own:
                received = self._observers[observer].receive(f"{protocol} {port}", ARRIVAL_S)
                if received is None:
                    raise RuntimeError(f"{self._addresses[observer]}:{port}/{protocol} has not heard from everybody")
                name, host, at = received
                if host != self._lab.host(name).public:
                    raise RuntimeError(f"{name} was seen under {host}, not {self._lab.host(name).public}")
                seen[name].append(at)
        return seen, {name: set(ports) == {own[name]} for name, ports in seen.items()}

    def _udp_filtering(self) -> dict[str, str]:
        """The host talks to one place alone; who may answer?"""
        near, sibling, far = self._places
        for name, hand in self._hands.items():
            hand.bind("f")
            hand.send("f", (self._addresses[near[0]], near[1]), name)
        for _ in self._hands:
            name, host, port = self._observers[near[0]].receive(f"udp {near[1]}", ARRIVAL_S)
            for text, (observer, source) in (("far", far), ("sibling", sibling), ("near", near)):
                self._observers[observer].send(f"udp {source}", (host, port), text)
        heard: dict[str, set[str]] = {name: set() for name in self._hands}
        for name, hand in self._hands.items():
            due = {"near", "sibling", "far"} if NAT_TYPES[name].unsolicited == "accept" else {"near"}
            while not due <= heard[name] and (received := hand.receive("f", ARRIVAL_S)):
                heard[name].add(received[0])
        time.sleep(SILENCE_S)  # what should not come has had all that time, and this
        return {name: self._verdict(hand, heard[name]) for name, hand in self._hands.items()}

    @staticmethod
    def _verdict(hand: Hand, heard: set[str]) -> str:
        """Who may answer a host that heard these, and what still lies in its socket."""
        while received := hand.receive("f", 0.0):
            heard.add(received[0])
        if "near" not in heard:
            return "no answer at all"
        return INDEPENDENT if "far" in heard else BY_ADDRESS if "sibling" in heard else BY_PORT

    def _unsolicited(self) -> dict[str, str]:
        for hand in self._hands.values():
            hand.listen("listener", TCP_PORT)
        answering = {name for name in self._hands if NAT_TYPES[name].unsolicited != "drop"}
        return self._dial({name: (self._lab.host(name).public, TCP_PORT) for name in self._hands}, answering)

    def _mapped_tcp(self) -> dict[str, str]:
        hosts = [self._lab.host(name) for name in self._hands]
        return self._dial({host.name: (host.public, host.mapped_tcp) for host in hosts}, set(self._hands))

    def _dial(self, to: dict[str, tuple[str, int]], answering: set[str]) -> dict[str, str]:
        """From an observer to each; `answering`: those that should answer somehow."""
        for name, where in to.items():
            self._observers[1].connect(name, where, "hello")
        return outcomes({name: (self._observers[1], name) for name in to}, answering)

    def _mapped_udp(self) -> dict[str, str]:
        self._observers[1].bind("dialler")
        for name, hand in self._hands.items():
            hand.bind("m", UDP_PORT)
            host = self._lab.host(name)
            self._observers[1].send("dialler", (host.public, host.mapped_udp), "hello")
        return {name: "arrived" if hand.receive("m", ARRIVAL_S) else "lost" for name, hand in self._hands.items()}

    def _hairpin(self, answering: set[str]) -> dict[str, str]:
        """Each host dials its own mapped port by its public address."""
        for name, hand in self._hands.items():
            host = self._lab.host(name)
            hand.connect("hairpin", (host.public, host.mapped_tcp), "hello")
        return outcomes({name: (hand, "hairpin") for name, hand in self._hands.items()}, answering)


def outcomes(begun: dict[Key, tuple[Hand, str]], answering: set[Key]) -> dict[Key, str]:
    """What became of connections, by key. Those that should get an answer are waited for, however slow the machine;
    the others have had all that time, and SILENCE_S more."""
    came = {key: hand.outcome(name, ARRIVAL_S) for key, (hand, name) in begun.items() if key in answering}
    time.sleep(SILENCE_S)
    return {key: came.get(key) or hand.outcome(name, 0.0) for key, (hand, name) in begun.items()}


def _mapping(ports: list[int]) -> str:
    near, sibling, far = ports
    if near == sibling == far:
        return INDEPENDENT
    return BY_ADDRESS if near == sibling else BY_PORT


def report(measured: dict[str, Behaviour]) -> tuple[str, bool]:
    """A table of what was seen, the intended value beside each that differs; and whether none does."""
    columns = [field.name for field in fields(Behaviour)]
    rows, agrees = [["type", *columns]], True
    for nat, behaviour in measured.items():
        row = [nat]
        for column in columns:
            seen, meant = str(getattr(behaviour, column)), str(getattr(intended(nat), column))
            agrees = agrees and seen == meant
            row.append(seen if seen == meant else f"{seen} (not {meant})")
        rows.append(row)
    # Types as columns: their behaviours are long words.
    turned = list(zip(*rows, strict=True))
    widths = [max(len(line[column]) for line in turned) for column in range(len(rows))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in turned)
    return text, agrees
