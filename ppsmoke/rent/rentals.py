"""What was rented in a run and what it cost, for `--json` and for those who must know what is still open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppsmoke.rent.offers import Candidate
from ppsmoke.rent.shapes import Instance

GIGABYTE = 1e9


@dataclass
class Rental:
    """One instance: which stage's, of which generation, on which offer, how it went. Times in seconds since 1970."""

    stage: int
    generation: int
    candidate: Candidate
    instance_id: int
    label: str
    made_at: float
    download_bytes: int
    latest: Instance | None = None  # what the account showed of it last
    ran: bool = False
    failure: str = ""
    ended_at: float | None = None
    ending: str | None = None  # "destroyed", "was gone"; None: not confirmed

    def shows(self) -> str:
        """How the account showed it last."""
        if self.latest is None:
            return "not on the account yet"
        said = f": {self.latest.status_msg}" if self.latest.status_msg else ""
        return f"{self.latest.actual_status or 'provisioning'}{said}"

    def usd(self, now: float) -> float:
        """By the hour since the create (its GPU counts from running on only: this is the most), and by its download."""
        offer = self.candidate.offer
        seconds = max(0.0, (self.ended_at or now) - self.made_at)
        return offer.dph_total * seconds / 3600 + self.download_bytes / GIGABYTE * offer.inet_down_usd_per_gb

    def to_json(self, now: float) -> dict[str, Any]:
        offer = self.candidate.offer
        return {
            "stage": self.stage,
            "generation": self.generation,
            "instance_id": self.instance_id,
            "label": self.label,
            "offer_id": offer.id,
            "machine_id": offer.machine_id,
            "host_id": offer.host_id,
            "gpu": offer.gpu_name,
            "place": offer.place,
            "usd_per_h": offer.dph_total,
            "rented_s": round((self.ended_at or now) - self.made_at, 3),
            "usd": round(self.usd(now), 6),
            "failure": self.failure or None,
            "ended": self.ending,
        }
