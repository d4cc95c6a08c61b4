"""How the lab and its warden talk: JSON objects, one packet each, fds beside them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.lab.nat_lab.spec import Site

MAX_MESSAGE_BYTES = 192 << 10  # a packet of a Unix socket; the longest is an environment


def write_site(site: Site) -> dict[str, Any]:
    return asdict(site) | {"mapped": sorted(site.mapped)}


def read_site(fields: dict[str, Any]) -> Site:
    return Site(**fields | {"hosts": tuple(fields["hosts"]), "mapped": frozenset(fields["mapped"])})
