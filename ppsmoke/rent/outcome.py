"""What is to be ended, and what an attempt at it came to: plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """An instance to end. made_at: seconds since 1970, None if that is long ago: one made lately may not show yet."""

    instance_id: int
    label: str | None
    stage: int | None = None
    made_at: float | None = None


@dataclass(frozen=True)
class Ended:
    """Confirmed gone. `how`: "destroyed", "was gone" or "never appeared"."""

    instance_id: int | None
    label: str | None
    how: str


@dataclass(frozen=True)
class Leftover:
    """Not confirmed gone: it may still cost money."""

    instance_id: int | None
    label: str | None
    why: str
    stage: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What an attempt to end things came to. `warnings` are for the log: what was not as it should be."""

    ended: tuple[Ended, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.ended + other.ended, self.leftovers + other.leftovers, self.warnings + other.warnings)
