"""The evaluation of a search against the market, with the service's coercions and its refusals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.lab.fake_vast.market import Offer

MAX_ROWS = 64  # late 2026: at most so many offers a reply, whatever the limit says
HOURS_PER_MONTH = 730.0
DEFAULT_STORAGE_GB = 8.0  # the docs' default; the official client sends 5.0 itself


class SearchRefused(ValueError):
    """The server's 400: its message is the reply's msg."""


ALIASES = {
    "display_active": "gpu_display_active",
    "cuda_vers": "cuda_max_good",
    "dph": "dph_total",
    "dlperf_usd": "dlperf_per_dphtotal",
    "flops_usd": "flops_per_dphtotal",
    "gpu_totalram": "gpu_total_ram",
}
_OPTIONS = {"order", "type", "limit", "allocated_storage", "disable_bundling", "select_cols"}
_KINDS = {"on-demand": False, "ondemand": False, "reserved": False, "bid": True, "interruptible": True}


def search(offers: Iterable[Offer], query: Any, *, now: float, sloppy: bool = False) -> list[dict[str, Any]]:
    """The rows that answer a flat filter object. Raises SearchRefused as the server answers 400."""
    if not isinstance(query, dict):
        raise SearchRefused("Invalid json body")
    filters = {name: tests for name, tests in query.items() if name not in _OPTIONS}
    for name, tests in filters.items():
        _check_filter(name, tests)
    if sloppy:
        loose = next((name for name, tests in filters.items() if _is_numeric(tests)), None)
        filters.pop(loose, None)
    kind = str(query.get("type") or "on-demand")
    if kind not in _KINDS:
        raise SearchRefused(f"{kind} is not a valid offer type")
    storage_gb = _number(query.get("allocated_storage")) or DEFAULT_STORAGE_GB
    rows = [priced(offer.row, storage_gb, is_bid=_KINDS[kind], now=now) for offer in offers if not offer.rented]
    rows = [row for row in rows if all(_passes(row, name, tests) for name, tests in filters.items())]
    return _ordered(rows, query.get("order"))[: _limit(query.get("limit"))]


def priced(row: dict[str, Any], storage_gb: float, *, is_bid: bool, now: float) -> dict[str, Any]:
    """The row as one caller sees it: dph_total includes the storage asked for."""
    disk_per_h = row["storage_cost"] * storage_gb / HOURS_PER_MONTH
    gpu_per_h = row["min_bid"] if is_bid else row["dph_base"]
    total = round(gpu_per_h + disk_per_h, 6)
    parts = {"gpuCostPerHour": gpu_per_h, "diskHour": disk_per_h, "totalHour": total, "discountTotalHour": 0.0,
             "discountedTotalPerHour": total}  # fmt: skip
    return row | {
        "dph_total": total, "dph_total_adj": total, "discounted_dph_total": total, "storage_total_cost": disk_per_h,
        "is_bid": is_bid, "end_date": now + row["duration"], "search": parts, "instance": parts,
    }  # fmt: skip


def _check_filter(name: str, tests: Any) -> None:
    if not isinstance(tests, dict):
        raise SearchRefused(f"{tests} is not a valid search op")
    for operator, value in tests.items():
        if operator not in _OPERATORS:
            raise SearchRefused(f"{operator} is not a valid search op")
        if name == "driver_version" and _number(value) is None:
            raise SearchRefused("query values can't be None")


def _is_numeric(tests: dict[str, Any]) -> bool:
    return any(
        operator in ("gt", "gte", "lt", "lte") and _number(value) is not None for operator, value in tests.items()
    )


def _passes(row: dict[str, Any], name: str, tests: dict[str, Any]) -> bool:
    if name == "id":
        return False  # seen in the field: filtering on id matches nothing; ask_contract_id does
    field = ALIASES.get(name, name)
    if field == "verified":
        value: Any = row["verification"] == "verified"
    elif field == "driver_version":
        value = row["driver_vers"]
    elif field == "geolocation":
        value = str(row["geolocation"] or "").rpartition(", ")[2]
    elif field == "external":
        value = bool(row["external"])
    elif field in row:
        value = row[field]
    else:
        return False
    return all(_OPERATORS[operator](value, wanted) for operator, wanted in tests.items())


def _compare(value: Any, wanted: Any) -> int | None:
    """-1, 0 or 1; None where the two cannot be compared. Numbers and booleans may come as strings."""
    if value is None or wanted is None:
        return 0 if value is wanted else None
    if isinstance(value, str) and not isinstance(wanted, (int, float)):
        return (value > str(wanted)) - (value < str(wanted))
    left, right = _number(value), _number(wanted)
    if left is None or right is None:
        return None
    return (left > right) - (left < right)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return float(value.lower() == "true")
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _among(value: Any, wanted: Any) -> bool:
    return any(_compare(value, one) == 0 for one in (wanted if isinstance(wanted, list) else [wanted]))


_OPERATORS = {
    "eq": lambda value, wanted: _compare(value, wanted) == 0,
    "neq": lambda value, wanted: _compare(value, wanted) != 0,
    "gt": lambda value, wanted: _compare(value, wanted) == 1,
    "gte": lambda value, wanted: _compare(value, wanted) in (0, 1),
    "lt": lambda value, wanted: _compare(value, wanted) == -1,
    "lte": lambda value, wanted: _compare(value, wanted) in (0, -1),
    "in": _among,
    "notin": lambda value, wanted: not _among(value, wanted),
}


def _ordered(rows: list[dict[str, Any]], order: Any) -> list[dict[str, Any]]:
    order = [["score", "desc"]] if order is None else order
    if not isinstance(order, Sequence) or any(not isinstance(term, list) or len(term) != 2 for term in order):
        raise SearchRefused("order must be a list of [field, direction]")
    for field, direction in reversed(order):
        name = ALIASES.get(field, field)
        present = [row for row in rows if row.get(name) is not None]
        present.sort(key=lambda row: row[name], reverse=direction == "desc")
        rows = present + [row for row in rows if row.get(name) is None]
    return rows


def _limit(limit: Any) -> int:
    wanted = _number(limit)
    return MAX_ROWS if wanted is None else max(0, min(MAX_ROWS, int(wanted)))
