"""One direction of a cable: what becomes of a packet on it, and when. Pure: time is a number, chance has a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a direction of a cable does to packets. The default is a perfect cable.

    jitter_ms: at most so much more delay, drawn for each packet; it keeps their order. loss, duplicate, reorder:
    probabilities from 0 to 1; a reordered packet is held back for reorder_ms while others pass. rate_mbit: 0 is without
    limit; beyond queue_kib waiting packets a new one is dropped. cut: nothing passes, and what is under way is lost.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_ms: float = 5.0
    rate_mbit: float = 0.0
    queue_kib: float = 256.0
    cut: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (field.name in ("loss", "duplicate", "reorder") and value > 1):
                raise ValueError(f"{field.name} cannot be {value}")


class Cable:
    """A direction with its queue and its counters."""

    def __init__(self, conditions: Conditions, *, seed: str) -> None:
        self.conditions = conditions
        self.passed = self.lost = self.doubled = self.held_back = self.overflowed = self.bytes = 0
        self._chance = random.Random(seed)
        self._free_at = 0.0  # when the last packet has left the queue
        self._last_at = 0.0  # when the last packet in order arrives

    def admit(self, now: float, size: int) -> tuple[float, ...]:
        """When a packet that enters now arrives: once, twice, or never."""
        conditions = self.conditions
        if conditions.cut or (conditions.loss and self._chance.random() < conditions.loss):
            self.lost += 1
            return ()
        if conditions.rate_mbit:
            bytes_per_s = conditions.rate_mbit * 125_000
            waiting = max(0.0, self._free_at - now) * bytes_per_s
            if waiting + size > conditions.queue_kib * 1024:
                self.overflowed += 1
                return ()
            self._free_at = now = max(now, self._free_at) + size / bytes_per_s
        self.passed += 1
        self.bytes += size
        at = now + conditions.delay_ms / 1000
        if conditions.jitter_ms:
            at += self._chance.random() * conditions.jitter_ms / 1000
        if conditions.reorder and self._chance.random() < conditions.reorder:
            self.held_back += 1
            return (at + conditions.reorder_ms / 1000,)
        self._last_at = at = max(at, self._last_at)
        if conditions.duplicate and self._chance.random() < conditions.duplicate:
            self.doubled += 1
            return (at, at)
        return (at,)

    def counts(self) -> dict[str, int]:
        names = ("passed", "lost", "doubled", "held_back", "overflowed", "bytes")
        return {name: getattr(self, name) for name in names}
