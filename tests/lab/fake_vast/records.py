"""Rows as the API shows them: one instance as the read and the list know it. Pure."""

from __future__ import annotations

import re
from typing import Any

from tests.lab.fake_vast.instances import Instance
from tests.lab.fake_vast.search import priced

PORT_FLAG = re.compile(r"-p (\d{1,6}):(\d{1,6})(?:/(tcp|udp))?")
SAME_PORT_FROM = 70000  # a number from here on is a token: the same real port inside and outside


def wanted_ports(env: dict[str, str]) -> list[tuple[int, str]]:
    """(number inside, "tcp" or "udp") for every port flag, in order, each once."""
    found = [PORT_FLAG.fullmatch(name) for name in env]
    return list(dict.fromkeys((int(match[2]), match[3] or "tcp") for match in found if match))


def variables(env: dict[str, str]) -> dict[str, str]:
    """What is no docker flag: the container's own environment."""
    return {name: value for name, value in env.items() if not name.startswith("-")}


def inner_port(name: str, external: int) -> int:
    """The port that the container listens on for "7070/tcp"; a token's is its external one."""
    number = int(name.partition("/")[0])
    return external if number >= SAME_PORT_FROM else number


def instance_row(instance: Instance, now: float) -> dict[str, Any]:
    """Everything that the API tells about an instance; the list adds volume_info itself."""
    phase, body, ask = instance.phase(now), instance.body, instance.offer.row
    unloaded = not instance.is_live
    row = priced(ask, instance.disk_gb, is_bid=instance.is_bid, now=instance.created_at)
    up = phase.ports and phase.status in ("running", "exited", "offline", "unknown")
    kept = {name: row.get(name) for name in _FROM_OFFER}
    return kept | {
        "id": instance.id, "label": instance.label, "actual_status": phase.status, "status_msg": phase.msg or None,
        "cur_state": "unloaded" if unloaded else phase.cur, "next_state": "unloaded" if unloaded else phase.cur,
        "intended_status": phase.intended, "image_uuid": body.get("image"), "image_args": body.get("args") or [],
        "image_runtype": body.get("runtype"), "extra_env": [[name, value] for name, value in body["env"].items()],
        "onstart": body.get("onstart"), "template_id": None, "template_hash_id": None, "template_name": None,
        "jupyter_token": f"{instance.id:064x}", "public_ipaddr": f"{instance.address}\n", "static_ip": False,
        "local_ipaddrs": "172.17.0.2 10.0.0.4 \n", "ports": _docker_ports(instance) if up else None,
        "direct_port_start": -1, "direct_port_end": -1, "ssh_host": f"ssh{instance.id % 9 + 1}.vast.ai",
        "ssh_idx": str(instance.id % 9 + 1), "ssh_port": 10000 + instance.id % 20000, "machine_dir_ssh_port": None,
        "start_date": instance.created_at, "end_date": instance.created_at + float(ask["duration"]),
        "uptime_mins": (now - instance.created_at) / 60.0, "client_run_time": 1.1,
        "host_run_time": float(ask["duration"]),
        "gpu_totalram": ask["gpu_total_ram"], "gpu_util": 0.0 if up else None, "gpu_temp": 35.0 if up else None,
        "cpu_util": 0.0, "mem_usage": 0.1 if up else None, "mem_limit": 32.0 if up else None, "vmem_usage": 0.0,
        "disk_space": instance.disk_gb, "disk_usage": 0.4 if up else -1, "disk_util": 0.4 if up else -1,
        "country_code": str(ask["geolocation"]).rpartition(", ")[2], "is_bid": instance.is_bid,
    }  # fmt: skip


def _docker_ports(instance: Instance) -> dict[str, Any] | None:
    mapped: dict[str, Any] = {}
    for name, external in instance.ports.items():
        number, _, protocol = name.partition("/")
        inside = f"{inner_port(name, external)}/{protocol}" if int(number) >= SAME_PORT_FROM else name
        mapped[inside] = [{"HostIp": "0.0.0.0", "HostPort": str(external)}]
    if instance.script == "port-missing":
        mapped = {name: value for name, value in mapped.items() if not name.endswith("/tcp")}
    return mapped or None


_FROM_OFFER = (
    "machine_id", "host_id", "bundle_id", "duration", "dph_base", "dph_total", "min_bid", "storage_cost",
    "storage_total_cost", "search", "instance", "gpu_name", "num_gpus", "gpu_ram", "inet_up", "inet_down",
    "inet_up_cost", "inet_down_cost", "geolocation", "verification", "rentable", "driver_version",
    "cuda_max_good", "reliability2",
    "direct_port_count", "cpu_cores_effective", "cpu_ram", "disk_bw", "dlperf", "compute_cap", "hosting_type",
)  # fmt: skip
