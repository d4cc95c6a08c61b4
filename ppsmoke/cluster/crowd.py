"""Who waits at the door, and who has to go when it is full: the oldest of the address that holds the most places.

Whoever is honest is through in a moment, so that the oldest is the likeliest stranger; and whoever floods from one
address takes its own places from itself, never those of others. Pure.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")
IPV6_PREFIX_BITS = 64  # of one subscriber: it may come from any address below


class Crowd(Generic[T]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[T, str] = {}  # oldest first
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, one: T) -> bool:
        return one in self._places

    def enter(self, one: T, host: str) -> T | None:
        """Let it in; returns who has to go for that, if anybody has."""
        gone = self._who_goes() if len(self._places) >= self._most else None
        if gone is not None:
            self.leave(gone)
        place = neighbourhood(host)
        self._places[one] = place
        self._held[place] += 1
        return gone

    def leave(self, one: T) -> None:
        """It is through, or gone; whoever is not here is ignored."""
        place = self._places.pop(one, None)
        if place is not None:
            self._held -= Counter([place])  # drops what falls to zero

    def _who_goes(self) -> T:
        most = max(self._held.values())
        return next(one for one, place in self._places.items() if self._held[place] == most)


def neighbourhood(host: str) -> str:
    """The address itself, or an IPv6 one's network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX_BITS), strict=False))
