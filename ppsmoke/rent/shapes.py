"""The API's objects as frozen dataclasses, each field checked: missing, null and odd values are met here and only here.

Secrets of a record (environment, tokens) are left where they came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppsmoke.rent.verdicts import BadReply, one_line


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One machine's offer. Prices in dollars, sizes as the API gives them: RAM in MB, disk in GB, links in Mb/s."""

    id: int
    machine_id: int
    host_id: int | None
    gpu_name: str
    num_gpus: int
    gpu_ram_mb: float
    dph_total: float  # $/h with the disk that was searched for
    inet_down_mbps: float = 0.0
    inet_up_mbps: float = 0.0
    inet_down_usd_per_gb: float = 0.0
    inet_up_usd_per_gb: float = 0.0
    disk_gb: float = 0.0
    ports: int = 0
    reliability: float = 0.0
    verification: str = ""  # "verified", "unverified", "deverified"
    cuda: float = 0.0  # the newest CUDA its driver can run
    duration_s: float = 0.0  # how long it can still be rented
    place: str = ""  # "City, CC"
    address: str = ""  # public IP, "" if not told
    cpu_arch: str = ""
    rentable: bool = True
    is_bid: bool = False

    @property
    def country(self) -> str:
        """The two-letter code at the end of `place`, "" if there is none."""
        code = self.place.rsplit(",", 1)[-1].strip().upper()
        return code if len(code) == 2 and code.isalpha() else ""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One rented instance as the account sees it. `ports` maps "7070/tcp" to the public port number."""

    id: int
    label: str | None = None
    actual_status: str | None = None  # None while it is being provisioned
    cur_state: str = ""
    next_state: str = ""
    intended_status: str = ""
    status_msg: str = ""
    machine_id: int | None = None
    host_id: int | None = None
    address: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    dph_total: float = 0.0
    is_bid: bool = False
    started_at: float | None = None  # seconds since 1970
    gpu_name: str = ""
    disk_used_gb: float = -1.0  # -1 before there is a container
    place: str = ""

    @property
    def unloading(self) -> bool:
        """Its DELETE was accepted and is being carried out."""
        return "unloaded" in (self.cur_state, self.next_state)


@dataclass(frozen=True)
class Listing:
    """Every instance of the account, all pages. `served_at`: the service's clock at the first page, if it told.
    `pages`: of more than one it is no snapshot: a row can slip between two of them while others vanish."""

    instances: tuple[Instance, ...]
    served_at: float | None = None
    pages: int = 1


@dataclass(frozen=True)
class User:
    """Whose key it is. `credit`: usable dollars, None if the account does not say."""

    id: int
    credit: float | None


def read_offer(row: Any) -> Offer | None:
    """The offer in a row of a search reply, None for a row without what an offer cannot do without."""
    row = row if isinstance(row, dict) else {}
    offer_id, machine_id = _whole(row, "id", "ask_contract_id"), _whole(row, "machine_id")
    price, name = _number(row, "dph_total"), _text(row, "gpu_name")
    if offer_id is None or machine_id is None or price is None or price < 0 or not name:
        return None
    return Offer(
        id=offer_id,
        machine_id=machine_id,
        host_id=_whole(row, "host_id"),
        gpu_name=name,
        num_gpus=_whole(row, "num_gpus") or 1,
        gpu_ram_mb=_number(row, "gpu_ram") or 0.0,
        dph_total=price,
        inet_down_mbps=_number(row, "inet_down") or 0.0,
        inet_up_mbps=_number(row, "inet_up") or 0.0,
        inet_down_usd_per_gb=_per_gb(row, "inet_down_cost", "internet_down_cost_per_tb"),
        inet_up_usd_per_gb=_per_gb(row, "inet_up_cost", "internet_up_cost_per_tb"),
        disk_gb=_number(row, "disk_space") or 0.0,
        ports=_whole(row, "direct_port_count") or 0,
        reliability=_number(row, "reliability2", "reliability") or 0.0,
        verification=_text(row, "verification"),
        cuda=_number(row, "cuda_max_good") or 0.0,
        duration_s=_number(row, "duration") or 0.0,
        place=one_line(_text(row, "geolocation"), 60),
        address=_text(row, "public_ipaddr"),
        cpu_arch=_text(row, "cpu_arch"),
        rentable=row.get("rentable") is not False and row.get("rented") is not True,
        is_bid=row.get("is_bid") is True,
    )


def read_instance(row: Any) -> Instance:
    """The instance in a row. Raises BadReply when it has no id: a row that cannot be told apart may be ours."""
    instance_id = _whole(row, "id") if isinstance(row, dict) else None
    if instance_id is None:
        raise BadReply("an instance without an id in the API's answer", phase="rent")
    label = row.get("label")
    return Instance(
        id=instance_id,
        label=label if isinstance(label, str) and label else None,
        actual_status=_text(row, "actual_status") or None,
        cur_state=_text(row, "cur_state"),
        next_state=_text(row, "next_state"),
        intended_status=_text(row, "intended_status"),
        status_msg=one_line(_text(row, "status_msg"), 1000),
        machine_id=_whole(row, "machine_id"),
        host_id=_whole(row, "host_id"),
        address=_text(row, "public_ipaddr"),
        ports=_ports(row.get("ports")),
        dph_total=_number(row, "dph_total") or 0.0,
        is_bid=row.get("is_bid") is True,
        started_at=_number(row, "start_date"),
        gpu_name=_text(row, "gpu_name"),
        disk_used_gb=_number_or(row, "disk_usage", -1.0),
        place=one_line(_text(row, "geolocation"), 60),
    )


def read_single(body: dict[str, Any]) -> Instance | None:
    """The instance of a single read, whose one object stands under the plural key; None where that says `null`.
    Raises BadReply when the key is missing: an empty object proves nothing."""
    if "instances" not in body:
        raise BadReply("a single read without `instances`", phase="rent")
    row = body["instances"]
    if isinstance(row, list):
        if len(row) > 1:
            raise BadReply("a single read with several instances", phase="rent")
        row = row[0] if row else None
    return None if row is None else read_instance(row)


def read_page(body: dict[str, Any]) -> tuple[list[Instance], str | None]:
    """The rows of a page of the list, and the token of the next one. Raises BadReply."""
    rows, token = body.get("instances"), body.get("next_token")
    if not isinstance(rows, list):
        raise BadReply("a list of instances without `instances`", phase="rent")
    if token is not None and not isinstance(token, str):
        raise BadReply("a list of instances whose next_token is no text", phase="rent")
    return [read_instance(row) for row in rows], token or None


def read_user(body: dict[str, Any]) -> User:
    """Raises BadReply when the reply names no user."""
    user_id = _whole(body, "id")
    if user_id is None:
        raise BadReply("the current user has no id", phase="rent")
    return User(user_id, _number(body, "credit"))


def _ports(value: Any) -> dict[str, int]:
    """Docker's shape, {"7070/tcp": [{"HostIp": ..., "HostPort": "40123"}]}; what does not read is left out."""
    found: dict[str, int] = {}
    for name, bindings in value.items() if isinstance(value, dict) else ():
        for binding in bindings if isinstance(bindings, list) else ():
            port = _whole(binding, "HostPort") if isinstance(binding, dict) else None
            if port is not None and port < 65536:
                found.setdefault(str(name), port)
    return found


def _per_gb(row: dict[str, Any], name: str, per_tb_name: str) -> float:
    price = _number(row, name)
    if price is None:
        per_tb = _number(row, per_tb_name)
        price = per_tb / 1000 if per_tb is not None else 0.0
    return max(0.0, price)


def _number_or(row: dict[str, Any], name: str, default: float) -> float:
    value = _number(row, name)
    return default if value is None else value


def _number(row: dict[str, Any], *names: str) -> float | None:
    """The first of the fields that holds a finite number; numbers in strings count, bools do not."""
    for name in names:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        try:
            number = float(value)
        except (ValueError, OverflowError):
            continue
        if math.isfinite(number):
            return number
    return None


def _whole(row: dict[str, Any], *names: str) -> int | None:
    """The first of the fields that holds a whole number from 0 up."""
    for name in names:
        number = _number(row, name)
        if number is not None and number >= 0 and number == int(number):
            return int(number)
    return None


def _text(row: dict[str, Any], name: str) -> str:
    """The field's text without space around it (`public_ipaddr` comes with a newline), "" if it is none."""
    value = row.get(name)
    return value.strip() if isinstance(value, str) else ""
