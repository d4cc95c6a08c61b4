"""The gossiped name registry: who says that it owns which name. Pure.

Only an owner writes its entries, so a false death erases nothing, and a lying member can add entries but never
replace another's: one entry is kept for each (name, owner), and whoever resolves checks the owner's role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_NAME_BYTES = 64
MAX_VALUE_BYTES = 128
MAX_NAMES_PER_OWNER = 64
MAX_OWNERS_PER_NAME = 32
MAX_ENTRIES = 1024
MAX_VERSION = (1 << 32) - 1
MAX_GENERATION = (1 << 32) - 1


class NameEntry(NamedTuple):
    """generation: given by the orchestrator, a replacement's is higher. version: the owner's, counts its writes."""

    name: str
    owner: str
    owner_epoch: int
    version: int
    generation: int
    value: bytes
    deleted: bool = False

    def newer_than(self, other: NameEntry) -> bool:
        """Of two entries by one owner for one name."""
        return (self.owner_epoch, self.version) > (other.owner_epoch, other.version)

    def rank(self) -> tuple[int, int, str]:
        """Of entries by several owners for one name the highest counts."""
        return (self.generation, self.owner_epoch, self.owner)


class NameRegistry:
    """Every entry that this node has heard of, its own included."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], NameEntry] = {}
        self._of_owner: Counter[str] = Counter()
        self._of_name: Counter[str] = Counter()
        self.refused = 0  # entries beyond the bounds
        self.version = 0  # grows with every change

    def write(self, name: str, *, owner: str, epoch: int, value: bytes, generation: int, deleted: bool) -> NameEntry:
        """The owner's own entry, above all it wrote before. Raises ValueError if name or value do not fit."""
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"a name has 1 to {MAX_NAME_BYTES} bytes: {name!r}")
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"the value of {name} has {len(value)} bytes, at most {MAX_VALUE_BYTES} fit")
        if not 0 <= generation <= MAX_GENERATION:
            raise ValueError(f"the generation of {name} is {generation}, at most {MAX_GENERATION} fits")
        previous = self._entries.get((name, owner))
        version = previous.version + 1 if previous and previous.owner_epoch == epoch else 1
        entry = NameEntry(name, owner, epoch, version, generation, value, deleted)
        self._keep(entry)
        return entry

    def hear(self, entry: NameEntry) -> bool:
        """Whether the entry was news (and is kept now)."""
        known = self._entries.get((entry.name, entry.owner))
        if known is None:
            if not self._has_room(entry):
                self.refused += 1
                return False
        elif not entry.newer_than(known):
            return False
        self._keep(entry)
        return True

    def _keep(self, entry: NameEntry) -> None:
        if (entry.name, entry.owner) not in self._entries:
            self._of_owner[entry.owner] += 1
            self._of_name[entry.name] += 1
        self._entries[entry.name, entry.owner] = entry
        self.version += 1

    def _has_room(self, entry: NameEntry) -> bool:
        owned, owners = self._of_owner[entry.owner], self._of_name[entry.name]
        return len(self._entries) < MAX_ENTRIES and owned < MAX_NAMES_PER_OWNER and owners < MAX_OWNERS_PER_NAME

    def get(self, name: str, owner: str) -> NameEntry | None:
        return self._entries.get((name, owner))

    def lookup(self, name: str, *, lives: Callable[[str, int], bool]) -> list[NameEntry]:
        """Entries for the name whose owner lives(owner, epoch), the best first."""
        found = [entry for (known, _), entry in self._entries.items() if known == name and not entry.deleted]
        return sorted((e for e in found if lives(e.owner, e.owner_epoch)), key=NameEntry.rank, reverse=True)

    def rivals(self, entry: NameEntry) -> list[NameEntry]:
        """Entries of other owners for the same name that rank higher."""
        others = [e for (name, owner), e in self._entries.items() if name == entry.name and owner != entry.owner]
        return sorted(e for e in others if not e.deleted and e.rank() > entry.rank())

    def of(self, owner: str) -> list[NameEntry]:
        return [entry for (_, known), entry in sorted(self._entries.items()) if known == owner]

    def forget(self, owner: str) -> None:
        """The owner is gone for good and its memory spent."""
        for key in [key for key in self._entries if key[1] == owner]:
            del self._entries[key]
            self._of_name -= Counter([key[0]])  # drops what falls to zero
            self.version += 1
        del self._of_owner[owner]

    def __iter__(self) -> Iterator[NameEntry]:
        """In a fixed order: byte-identical replay depends on it."""
        return iter([self._entries[key] for key in sorted(self._entries)])

    def __len__(self) -> int:
        return len(self._entries)
