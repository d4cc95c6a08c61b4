"""What an instance has cost so far. Pure: phases and `now` in, dollars out."""

from __future__ import annotations

from typing import Any

from tests.lab.fake_vast.instances import Instance
from tests.lab.fake_vast.search import HOURS_PER_MONTH

_GPU_BILLED = ("running", "frozen")


def dollars(instance: Instance, now: float) -> float:
    """GPU by the second while running, storage by the second while it exists (not while the host is away), and the
    image's bytes at the machine's price."""
    end = now if instance.destroyed_at is None else instance.destroyed_at
    disk_per_h = instance.offer.row["storage_cost"] * instance.disk_gb / HOURS_PER_MONTH
    total = 0.0
    for index, phase in enumerate(instance.phases):
        until = min(end, instance.phases[index + 1].at) if index + 1 < len(instance.phases) else end
        hours = max(0.0, until - phase.at) / 3600.0
        gpu = instance.dph_gpu if phase.status in _GPU_BILLED and phase.cur == "running" else 0.0
        total += hours * (gpu + (0.0 if phase.status in ("offline", "unknown") else disk_per_h))
    return total + pulled_gb(instance, end) * float(instance.offer.row["inet_down_cost"] or 0.0)


def pulled_gb(instance: Instance, now: float) -> float:
    """Gigabytes of the image that came over the wire by now; all of them once it has left loading."""
    loading = [phase.at for phase in instance.phases if phase.status == "loading"]
    if not loading or now < loading[0]:
        return 0.0
    running = [phase.at for phase in instance.phases if phase.serving or phase.ports]
    end = running[0] if running else loading[-1]
    return instance.image_gb if now >= end else instance.image_gb * (now - loading[0]) / max(1e-9, end - loading[0])


def rental(instance: Instance, now: float) -> dict[str, Any]:
    """The ledger's line for one instance."""
    return {
        "id": instance.id,
        "label": instance.label,
        "machine_id": instance.offer.row["machine_id"],
        "start": instance.created_at,
        "end": instance.destroyed_at,
        "status": instance.phase(now).status,
        "dollars": round(dollars(instance, now), 6),
        "dollars_per_h": round(instance.dph_gpu, 6),
    }
