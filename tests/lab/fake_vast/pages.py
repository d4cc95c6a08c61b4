"""The v1 list: filters, order and pages over rows, with the refusals of the real one. Pure."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.lab.fake_vast.search import SearchRefused

MAX_PAGE, SMALL_PAGE = 25, 5
FILTERABLE = {"id", "label", "actual_status", "gpu_name", "verification"}
_SALT = b"fake-page:"


def page(rows: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page. Raises SearchRefused for a filter on a computed column, PageRefused for a bad token."""
    filters = _json(query, "select_filters", {})
    if not isinstance(filters, dict):
        raise SearchRefused("Invalid select_filters")
    chosen = [row for row in rows if all(_passes(row, name, tests) for name, tests in filters.items())]
    chosen = _ordered(chosen, _json(query, "order_by", [{"col": "id", "dir": "asc"}]))
    limit = _limit(query.get("limit"))
    after = _after(query.get("after_token"))
    ids = [row["id"] for row in chosen]
    start = ids.index(after) + 1 if after in ids else sum(1 for row_id in ids if after is not None and row_id <= after)
    shown = chosen[start : start + limit]
    rest = len(chosen) > start + limit
    columns = _json(query, "select_cols", None)
    if isinstance(columns, list) and "*" not in columns:
        named = set(columns) | {"id"}
        out = [{name: value for name, value in row.items() if name in named} for row in shown]
    else:
        out = list(shown)
    return {
        "success": True,
        "instances_found": len(shown),
        "total_instances": len(chosen),
        "label_counts": dict(Counter(row["label"] or "" for row in chosen)),
        "next_token": token(shown[-1]["id"]) if rest else None,
        "instances": out,
    }


class PageRefused(ValueError):
    """400 invalid_token."""


def _json(query: Mapping[str, str], name: str, default: Any) -> Any:
    if name not in query:
        return default
    try:
        return json.loads(query[name])
    except ValueError:
        raise SearchRefused(f"Invalid {name}") from None


def _passes(row: dict[str, Any], name: str, tests: Any) -> bool:
    if name not in FILTERABLE:
        raise SearchRefused(f"{name} is not a valid search key")
    if not isinstance(tests, dict):
        raise SearchRefused(f"{tests} is not a valid search op")
    return all(_holds(row[name], operator, wanted) for operator, wanted in tests.items())


def _holds(value: Any, operator: str, wanted: Any) -> bool:
    match operator:
        case "eq":
            return value == wanted
        case "neq":
            return value != wanted
        case "in":
            return value in (wanted if isinstance(wanted, list) else [wanted])
        case "notin":
            return value not in (wanted if isinstance(wanted, list) else [wanted])
        case _:
            raise SearchRefused(f"{operator} is not a valid search op")


def _ordered(rows: list[dict[str, Any]], order: Any) -> list[dict[str, Any]]:
    if not isinstance(order, list) or any(not isinstance(term, dict) for term in order):
        raise SearchRefused("Invalid order_by")
    for term in reversed(order):
        column = term.get("col")
        present = [row for row in rows if row.get(column) is not None]
        present.sort(key=lambda row: row[column], reverse=term.get("dir") == "desc")
        rows = present + [row for row in rows if row.get(column) is None]
    return rows


def _limit(text: str | None) -> int:
    try:
        limit = MAX_PAGE if text is None else int(text)
    except ValueError:
        raise SearchRefused("Invalid limit") from None
    return SMALL_PAGE if limit <= 0 else min(limit, MAX_PAGE)


def token(row_id: int) -> str:
    return base64.urlsafe_b64encode(_SALT + str(row_id).encode()).decode()


def _after(token: str | None) -> int | None:
    if token is None:
        return None
    try:
        text = base64.urlsafe_b64decode(token.encode())
        if text.startswith(_SALT):
            return int(text[len(_SALT) :])
    except ValueError:
        pass
    raise PageRefused("invalid_token")
