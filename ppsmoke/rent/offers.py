"""Offers in, ordered offers out: what a stage needs, what an offer would cost, which ones to take. Pure; no network.

The service applies numeric filters loosely, so every one is applied again here, and counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ppsmoke.rent.shapes import Offer

START_OVERHEAD_S = 60.0  # issue 3: container, pip and code push, beside what has to be downloaded
START_SHARE = 0.6  # of the budget: a host predicted to take longer to start is ruled out
SLACK_RAM = 0.97  # a "24 GB" card reports 24,564 MB, an L4 22.5 GB
LONGEST_FACTOR, LONGEST_LEAST_S = 2.0, 3600.0  # an offer must last twice the longest run, and an hour
FAR_BELOW_MEDIAN, MEDIAN_OF_AT_LEAST = 0.5, 4  # cheap traps: hosts whose containers never start (facts, section 10, 3)
NEAR_MARGIN = 0.04  # a second stage near the first may cost so much more than the cheapest
SLOW_REGISTRY_COUNTRIES = frozenset({"CN"})  # Docker Hub is filtered there (facts, section 10, 11)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a stage's machine must be. Dollars an hour are for one machine, disk included."""

    download_bytes: int  # on each machine before it is ready: image, packages, its part of the model
    disk_gb: float = 16.0
    gpu_name: str = ""  # as the API spells it (gpu_names.gpu_name); "": any
    min_gpu_ram_mb: float = 0.0
    min_reliability: float = 0.98
    min_cuda: float = 12.4  # what tinygrad's PTX needs of a driver, with room
    min_inet_down_mbps: float = 100.0
    min_ports: int = 2  # one TCP, one UDP
    max_dph: float = 1.0
    regions: tuple[str, ...] = ()  # two-letter country codes; (): anywhere
    verified: Literal["required", "any"] = "required"
    budget_s: float = 300.0  # the run's, all phases but destroying
    expected_s: float = 240.0  # how long a run usually rents
    lifetime_s: float = 600.0  # after which the machine ends itself, whatever happens

    def search_filters(self) -> dict[str, Any]:
        """The body of a search: the same needs in the service's words and units (MB, seconds)."""
        filters: dict[str, Any] = {
            "external": {"eq": False},
            "rentable": {"eq": True},
            "num_gpus": {"eq": 1},
            "disk_space": {"gte": self.disk_gb},
            "reliability2": {"gte": self.min_reliability},
            "cuda_max_good": {"gte": self.min_cuda},
            "inet_down": {"gte": self.min_inet_down_mbps},
            "direct_port_count": {"gte": self.min_ports},
            "dph_total": {"lte": self.max_dph},
            "duration": {"gte": self.min_duration_s},
            "type": "on-demand",
            "allocated_storage": self.disk_gb,  # what dph_total is priced with
        }
        if self.verified == "required":
            filters["verified"] = {"eq": True}
        if self.gpu_name:
            filters["gpu_name"] = {"eq": self.gpu_name}
        if self.min_gpu_ram_mb:
            filters["gpu_ram"] = {"gte": round(self.min_gpu_ram_mb * SLACK_RAM)}
        if self.regions:
            filters["geolocation"] = {"in": list(self.regions)}
        return filters

    def broad_filters(self) -> dict[str, Any]:
        """A search that shows what the needs keep out: the model alone, at the same disk's prices."""
        kept = ("rentable", "type", "allocated_storage", "gpu_name")
        return {name: value for name, value in self.search_filters().items() if name in kept}

    @property
    def min_duration_s(self) -> float:
        return max(LONGEST_LEAST_S, LONGEST_FACTOR * self.lifetime_s)

    def start_s(self, offer: Offer) -> float:
        """How long a machine is predicted to take from its create to a loaded stage."""
        if offer.inet_down_mbps <= 0:
            return float("inf")
        return START_OVERHEAD_S + self.download_bytes * 8 / (offer.inet_down_mbps * 1e6)

    def usd(self, offer: Offer, seconds: float) -> float:
        """What it costs for so long: by the hour, and for the bytes that it downloads."""
        return offer.dph_total * seconds / 3600 + self.download_bytes / 1e9 * offer.inet_down_usd_per_gb


# In this order: an offer counts against the first that it fails.
FILTERS = (
    "on demand",
    "one GPU",
    "gpu",
    "gpu memory",
    "disk",
    "verified",
    "reliability",
    "cuda",
    "download speed",
    "ports",
    "price",
    "time left",
    "region",
    "cpu",
    "start in time",
    "failed before",
)


def failed_filters(offer: Offer, wanted: Wanted, *, failed_hosts: Collection[int] = ()) -> list[str]:
    """The names, of FILTERS, that this offer does not pass. What an offer does not tell is not passed either.
    failed_hosts: machine ids that let this run down."""
    passes = {
        "on demand": offer.rentable and not offer.is_bid,
        "one GPU": offer.num_gpus == 1,
        "gpu": not wanted.gpu_name or offer.gpu_name.casefold() == wanted.gpu_name.casefold(),
        "gpu memory": offer.gpu_ram_mb >= wanted.min_gpu_ram_mb * SLACK_RAM,
        "disk": offer.disk_gb >= wanted.disk_gb,
        "verified": wanted.verified == "any" or offer.verification == "verified",
        "reliability": offer.reliability >= wanted.min_reliability,
        "cuda": offer.cuda >= wanted.min_cuda,
        "download speed": offer.inet_down_mbps >= wanted.min_inet_down_mbps,
        "ports": offer.ports >= wanted.min_ports,
        "price": offer.dph_total <= wanted.max_dph,
        "time left": offer.duration_s >= wanted.min_duration_s,
        "region": not wanted.regions or offer.country in {code.upper() for code in wanted.regions},
        "cpu": offer.cpu_arch in ("", "amd64", "x86_64"),
        "start in time": wanted.start_s(offer) <= START_SHARE * wanted.budget_s,
        "failed before": offer.machine_id not in failed_hosts,
    }
    return [name for name in FILTERS if not passes[name]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An acceptable offer, what it costs, and what speaks against it."""

    offer: Offer
    expected_usd: float  # for the time a run usually takes
    most_usd: float  # for its whole lifetime
    start_s: float
    bad_signs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removed:
    """How many offers a filter took out: `first` that had passed all before it, `alone` that it alone took out."""

    name: str
    first: int
    alone: int


def rank_offers(
    offers: Iterable[Offer], wanted: Wanted, *, failed_hosts: Collection[int] = ()
) -> tuple[list[Candidate], list[Removed]]:
    """The acceptable offers, those with bad signs last, the cheapest first by what a usual run would cost on them; and
    what each filter removed."""
    offers = list(offers)
    medians = median_prices(offers)
    first, alone = dict.fromkeys(FILTERS, 0), dict.fromkeys(FILTERS, 0)
    candidates = []
    for offer in offers:
        failed = failed_filters(offer, wanted, failed_hosts=failed_hosts)
        if failed:
            first[failed[0]] += 1
            alone[failed[0]] += len(failed) == 1
            continue
        candidates.append(
            Candidate(
                offer=offer,
                expected_usd=wanted.usd(offer, wanted.expected_s),
                most_usd=wanted.usd(offer, wanted.lifetime_s),
                start_s=wanted.start_s(offer),
                bad_signs=tuple(bad_signs(offer, medians)),
            )
        )
    candidates.sort(key=lambda one: (bool(one.bad_signs), one.expected_usd, one.offer.id))
    return candidates, [Removed(name, first[name], alone[name]) for name in FILTERS if first[name]]


def median_prices(offers: Iterable[Offer]) -> Mapping[str, float]:
    """The median $/h of each GPU model that is offered often enough to have one."""
    prices: dict[str, list[float]] = {}
    for offer in offers:
        prices.setdefault(offer.gpu_name, []).append(offer.dph_total / max(1, offer.num_gpus))
    return {name: statistics.median(found) for name, found in prices.items() if len(found) >= MEDIAN_OF_AT_LEAST}


def bad_signs(offer: Offer, medians: Mapping[str, float]) -> list[str]:
    """What the field has learnt to distrust, in words; [] for an ordinary offer."""
    signs = []
    if offer.verification == "deverified":
        signs.append("deverified")
    median = medians.get(offer.gpu_name)
    if median is not None and offer.dph_total < FAR_BELOW_MEDIAN * median:
        signs.append(f"far below the ${median:.3f} an hour that is usual for its model")
    if offer.country in SLOW_REGISTRY_COUNTRIES:
        signs.append("image registries are often slow or filtered there")
    return signs


def choose(candidates: Sequence[Candidate], stages: int) -> list[Candidate]:
    """One candidate a stage, fewer if there are not enough: the cheapest first, each further one on a machine and host
    of its own."""
    chosen: list[Candidate] = []
    while len(chosen) < stages and (found := pick(candidates, [one.offer for one in chosen])) is not None:
        chosen.append(found)
    return chosen


def pick(
    candidates: Sequence[Candidate], beside: Sequence[Offer], *, not_offers: Collection[int] = ()
) -> Candidate | None:
    """The next one to take beside machines that are in use: the cheapest on another machine and host; a nearer one if
    it costs at most NEAR_MARGIN more. not_offers: ids that were tried. None if nothing is left."""
    free = [
        one
        for one in candidates
        if one.offer.id not in not_offers and not any(same_place(one.offer, other) for other in beside)
    ]
    if not free or not beside:
        return free[0] if free else None
    cheapest = free[0]
    limit_usd = cheapest.expected_usd * (1 + NEAR_MARGIN)
    close = [one for one in free if one.expected_usd <= limit_usd and bool(one.bad_signs) == bool(cheapest.bad_signs)]
    return min(close, key=lambda one: (distance(one.offer, beside[0]), one.expected_usd, one.offer.id))


def same_place(one: Offer, other: Offer) -> bool:
    """Would both share a machine, a host or a public address? Then one failure takes both, and they may not even reach
    each other through their own NAT."""
    if one.machine_id == other.machine_id:
        return True
    if one.host_id is not None and one.host_id == other.host_id:
        return True
    return bool(one.address) and one.address == other.address


# Continents by country code, as far as hosts are found there.
_CONTINENTS = {
    "Europe": "AL AT BA BE BG BY CH CY CZ DE DK EE ES FI FR GB GR HR HU IE IS IT LT LU LV MD ME MK MT NL NO PL PT RO "
    "RS RU SE SI SK UA UK",
    "North America": "CA CR DO GT MX PA PR US",
    "South America": "AR BO BR CL CO EC PE PY UY VE",
    "Asia": "AE AM AZ BD CN GE HK ID IL IN IR JO JP KG KH KR KW KZ LK MN MO MY NP OM PH PK QA SA SG TH TR TW UZ VN",
    "Africa": "DZ EG ET GH KE MA MU NG SN TN TZ UG ZA",
    "Oceania": "AU FJ NZ",
}
_CONTINENT = {code: name for name, codes in _CONTINENTS.items() for code in codes.split()}


def distance(one: Offer, other: Offer) -> int:
    """0 in the same place, 1 in the same country, 2 on the same continent, 3 elsewhere or unknown."""
    if not one.country or not other.country:
        return 3
    if one.country == other.country:
        return 0 if one.place == other.place else 1
    continent = _CONTINENT.get(one.country)
    return 2 if continent is not None and continent == _CONTINENT.get(other.country) else 3
