"""The path that each pair of nodes must end on, for every combination of address translators: written before any run.

Twice, by two roads: TABLE is written out by hand; `expected` derives any cell from four rules. A test compares them.
The rules (facts on reachability: "whoever can dial, dials"; a relay lives on a node that can be dialled; punching only
between endpoint independent ports):

1. direct: one of the two can dial the other. An open node, a mapped port, and a neighbour on the same network can be
   dialled; a mapped port of one's own public address only if the router does hairpin.
2. A third node carries what these two have to tell each other if each of them has a direct link to it.
3. punched: rule 1 does not hold, rule 2 does, both dialled the third from outside its network so that it saw their
   public ports, both ports are endpoint independent, and their public addresses differ.
4. relayed: rules 1 and 3 do not hold, rule 2 does. Where rule 2 does not hold either, it is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tests.lab.nat_lab.nat_types import NAT_TYPES

Path = Literal["direct", "punched", "relayed", "impossible"]
Pair = tuple[str, str]

HOME, STAGE_0, STAGE_1 = NODES = ("home", "stage-0", "stage-1")
PAIRS: tuple[Pair, ...] = ((HOME, STAGE_0), (HOME, STAGE_1), (STAGE_0, STAGE_1))
STAGE_TYPES = ("open", "firewall-drop", "nat-preserving", "nat-random", "nat-fully-random")
HOME_TYPES = ("open", "nat-preserving", "nat-fully-random")
REMEDIES = {
    HOME: "forward a TCP port to it, or run it where it can be dialled",
    STAGE_0: "rent stage 0 with a direct (mapped) TCP port",
    STAGE_1: "rent stage 1 with a direct (mapped) TCP port",
}
LETTERS: dict[str, Path] = {"D": "direct", "P": "punched", "R": "relayed", "x": "impossible"}

# A word per cell: home to stage 0, home to stage 1, stage 0 to stage 1. Rows: stage 0; columns: stage 1; both in the
# order of STAGE_TYPES. No port is mapped. "PDD" says: home reaches stage 0 by punching, through stage 1.
TABLE: dict[str, tuple[str, ...]] = {
    # home
    "open": (
        "DDD DDD DDD DDD DDD",  # stage 0: open
        "DDD DDP DDP DDR DDR",  # firewall-drop
        "DDD DDP DDP DDR DDR",  # nat-preserving
        "DDD DDR DDR DDR DDR",  # nat-random
        "DDD DDR DDR DDR DDR",  # nat-fully-random
    ),
    "nat-preserving": (
        "DDD DPD DPD DRD DRD",
        "PDD xxx xxx xxx xxx",
        "PDD xxx xxx xxx xxx",
        "RDD xxx xxx xxx xxx",
        "RDD xxx xxx xxx xxx",
    ),
    "nat-fully-random": (
        "DDD DRD DRD DRD DRD",
        "RDD xxx xxx xxx xxx",
        "RDD xxx xxx xxx xxx",
        "RDD xxx xxx xxx xxx",
        "RDD xxx xxx xxx xxx",
    ),
}
# With a mapped port on both stages every pair of every cell is direct. With one on a single stage, that stage's row or
# column is the one of "open", whatever its own type.


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination. mapped: nodes with mapped ports; udp_blocked: nodes whose router passes no UDP.

    neighbours: the two stages share one public address without hairpin; "routed": they reach each other behind it,
    "isolated": they do not.
    """

    home: str = "open"
    stage_0: str = "open"
    stage_1: str = "open"
    mapped: frozenset[str] = field(default_factory=frozenset)
    udp_blocked: frozenset[str] = field(default_factory=frozenset)
    neighbours: Literal["", "routed", "isolated"] = ""

    def type_of(self, node: str) -> str:
        return {HOME: self.home, STAGE_0: self.stage_0, STAGE_1: self.stage_1}[node]

    def __str__(self) -> str:
        parts = [f"{self.stage_0}/{self.stage_1}/{self.home}"]
        parts += [f"mapped:{'+'.join(sorted(self.mapped))}"] if self.mapped else []
        parts += [f"no-udp:{'+'.join(sorted(self.udp_blocked))}"] if self.udp_blocked else []
        parts += [f"one-address:{self.neighbours}"] if self.neighbours else []
        return " ".join(parts)


@dataclass(frozen=True)
class Expected:
    """paths: by pair. must_change: the nodes of which one must become dialable; empty if every pair has a path."""

    paths: dict[Pair, Path]
    must_change: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        return not self.must_change

    @property
    def word(self) -> str:
        letters = {path: letter for letter, path in LETTERS.items()}
        return "".join(letters[self.paths[pair]] for pair in PAIRS)

    def remedies(self) -> list[str]:
        return [f"{node}: {REMEDIES[node]}" for node in self.must_change]


def expected(cell: Cell) -> Expected:
    """The four rules of this module, applied."""
    paths = {pair: _path(cell, *pair) for pair in PAIRS}
    # Three nodes: a pair without a path means that nobody whom both could reach can be dialled, so whichever of the
    # three becomes dialable mends it: an end directly, the third as the relay.
    return Expected(paths, NODES if "impossible" in paths.values() else ())


def _path(cell: Cell, one: str, other: str) -> Path:
    if _direct(cell, one, other):
        return "direct"
    (third,) = set(NODES) - {one, other}
    if not (_direct(cell, one, third) and _direct(cell, other, third)):
        return "impossible"
    seen = all(_can_dial(cell, node, third) and not _share_address(cell, node, third) for node in (one, other))
    punchable = all(NAT_TYPES[cell.type_of(node)].endpoint_independent for node in (one, other))
    return "punched" if seen and punchable and not _share_address(cell, one, other) else "relayed"


def _direct(cell: Cell, one: str, other: str) -> bool:
    return _can_dial(cell, one, other) or _can_dial(cell, other, one)


def _can_dial(cell: Cell, dialler: str, target: str) -> bool:
    if _share_address(cell, dialler, target):
        return cell.neighbours == "routed"  # no hairpin: a mapped port is of no use to a neighbour
    return target in cell.mapped or NAT_TYPES[cell.type_of(target)].unsolicited == "accept"


def _share_address(cell: Cell, one: str, other: str) -> bool:
    return bool(cell.neighbours) and {one, other} == {STAGE_0, STAGE_1}


def whole_table() -> list[Cell]:
    """Stage 0 x stage 1 x home, without and with mapped ports on both stages: 150 cells."""
    return [
        Cell(home=home, stage_0=stage_0, stage_1=stage_1, mapped=mapped)
        for mapped in (frozenset[str](), frozenset((STAGE_0, STAGE_1)))
        for home in HOME_TYPES
        for stage_0 in STAGE_TYPES
        for stage_1 in STAGE_TYPES
    ]


def _cell(stage_0: str, stage_1: str, home: str, mapped: str = "", **more) -> Cell:
    return Cell(home=home, stage_0=stage_0, stage_1=stage_1, mapped=frozenset(mapped.split()), **more)


_ALL, _STAGES = frozenset(NODES), "stage-0 stage-1"
# The cells with a name of their own, and the word that each must end on. The first twelve run in CI.
NAMED: dict[str, tuple[Cell, str]] = {
    "all-open": (_cell("open", "open", "open"), "DDD"),
    "home-open-stages-punch": (_cell("nat-preserving", "nat-preserving", "open"), "DDP"),
    "home-open-stages-relay": (_cell("nat-fully-random", "nat-preserving", "open"), "DDR"),
    "firewall-punches-nat": (_cell("firewall-drop", "nat-preserving", "open"), "DDP"),
    "reject-punches-reject": (_cell("firewall-reject", "nat-reject", "open"), "DDP"),
    "mapped-beats-every-nat": (_cell("nat-fully-random", "nat-random", "nat-fully-random", _STAGES), "DDD"),
    "home-punches-through-stage-0": (_cell("nat-preserving", "nat-preserving", "nat-preserving", "stage-0"), "DPD"),
    "home-relayed-by-stage-1": (_cell("nat-fully-random", "firewall-drop", "nat-preserving", "stage-1"), "RDD"),
    "nobody-can-be-dialled": (_cell("nat-preserving", "firewall-drop", "nat-preserving"), "xxx"),
    "udp-blocked-everywhere": (_cell("nat-preserving", "nat-random", "open", udp_blocked=_ALL), "DDR"),
    "one-address-routed": (
        _cell("nat-preserving", "nat-preserving", "nat-preserving", _STAGES, neighbours="routed"),
        "DDD",
    ),
    # Neither stage can dial the other, and home, which nobody can dial, dials both: it relays all the same.
    "one-address-isolated-home-relays": (
        _cell("nat-preserving", "nat-preserving", "nat-preserving", _STAGES, neighbours="isolated"),
        "DDR",
    ),
    "one-address-isolated-home-open": (
        _cell("nat-preserving", "nat-preserving", "open", neighbours="isolated"),
        "DDR",
    ),
    # Told of home alone, each learns from it where the other is on their own network.
    "one-address-routed-home-open": (
        _cell("nat-random", "nat-random", "open", neighbours="routed"),
        "DDD",
    ),
    "one-address-routed-nobody-dialable": (
        _cell("nat-preserving", "nat-preserving", "nat-preserving", neighbours="routed"),
        "xxD",
    ),
    "shifting-ports-punch": (_cell("nat-shifting", "nat-preserving", "open"), "DDP"),
    "shifting-against-random": (_cell("nat-shifting", "nat-random", "open"), "DDR"),
    "reject-against-drop": (_cell("nat-reject", "nat-preserving", "open"), "DDP"),
    "udp-blocked-at-stage-0": (
        _cell("nat-preserving", "nat-preserving", "open", udp_blocked=frozenset({STAGE_0})),
        "DDP",
    ),
    "udp-blocked-at-home": (
        _cell("open", "nat-preserving", "nat-preserving", udp_blocked=frozenset({HOME})),
        "DPD",
    ),
    # Stage 0, the relay, sees stage 1 under its address behind the router: no use to home.
    "one-address-routed-neighbour-relays": (
        _cell("nat-preserving", "nat-preserving", "nat-preserving", "stage-0", neighbours="routed"),
        "DRD",
    ),
    "home-forwarded": (_cell("nat-fully-random", "nat-random", "nat-preserving", "home"), "DDR"),
}
IN_CI = tuple(NAMED)[:12]
