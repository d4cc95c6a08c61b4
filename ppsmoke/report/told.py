"""What a stage tells in JSON, made harmless: its host may lie, and send anything. What is not as it should be is left
out, as if it had not been told; nothing here raises."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_NUMBER = 1e18  # of bytes or microseconds; beyond it a number is a lie
MAX_TEXT_CHARS = 200
# Characters of JSON: many times the longest answer's timings; as values they take thirty times as much.
MAX_TOLD = 4 << 20


def value_of(text: str | bytes) -> Any:
    """The JSON value, None for what is none, too long, or nested so deeply that Python gives up."""
    if len(text) > MAX_TOLD:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def number(value: Any) -> float | int | None:
    """The value if it is a number that can be one of ours: no boolean, not negative, finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value <= MAX_NUMBER and not math.isnan(value) else None


def ready_of(text: str) -> dict[str, Any]:
    """A ready line, with what a run shows or compares of it."""
    said = value_of(text)
    found = {name: kind(said.get(name)) for name, kind in _READY.items()} if isinstance(said, dict) else {}
    return {name: value for name, value in found.items() if value is not None}


def timings_of(text: str) -> dict[str, Any]:
    """InferenceResponse's timings_json; {} unless all of it is numbers, and as many steps are in both lists."""
    said = value_of(text)
    if not isinstance(said, dict):
        return {}
    prefill_us, token_us, stage_us = said.get("prefill_us"), said.get("token_us", []), said.get("stage_us", [])
    steps = stage_us if isinstance(stage_us, list) else [None]
    if not all(_are_numbers(one) for one in (token_us, *steps)) or len(token_us) != len(steps):
        return {}
    if prefill_us is not None and number(prefill_us) is None:
        return {}
    return {"prefill_us": prefill_us, "token_us": token_us, "stage_us": steps}


def links_of(text: str) -> list[dict[str, Any]]:
    """A stage's own list of its links, each {"to", "path", "rtt_ms"}."""
    said = value_of(text)
    links = [link for link in said if isinstance(link, dict)] if isinstance(said, list) else []
    return [link_json(link.get("to"), link.get("path"), link.get("rtt_ms")) for link in links]


def link_json(to: Any, path: Any, rtt_ms: Any) -> dict[str, Any]:
    rtt_ms = number(rtt_ms)
    return {"to": _short(to, 64), "path": _short(path, 16), "rtt_ms": None if rtt_ms is None else round(rtt_ms, 3)}


def _short(value: Any, most: int) -> str:
    return value[:most] if isinstance(value, str) else ""


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(number(value) is not None for value in values)


def _text(value: Any) -> str | None:
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else None


def _blocks(value: Any) -> list[int] | None:
    return value if _are_numbers(value) and len(value) == 2 else None


def _model(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    return {"name": _text(value.get("name")), "sha256": _text(value.get("sha256"))}


_READY: dict[str, Callable[[Any], Any]] = {
    "fingerprint": _text,
    "device": _text,
    "blocks": _blocks,
    "model": _model,
    **dict.fromkeys(
        ("total_blocks", "context", "weight_bytes", "bytes_read", "load_s", "warmup_s", "peak_rss_bytes"), number
    ),
}
