"""The offers: a deterministic market with its decoys. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

DAY_S = 86400.0

# name, MB of memory, $/h, compute capability, dlperf, GB/s
GPUS = (
    ("RTX 3060", 12288, 0.070, 860, 9.6, 360.0),
    ("RTX 3090", 24576, 0.160, 860, 23.1, 936.0),
    ("RTX 4070", 12282, 0.110, 890, 16.2, 504.0),
    ("RTX 4090", 24564, 0.340, 890, 42.7, 1008.0),
    ("RTX 5090", 32607, 0.520, 1200, 60.4, 1792.0),
    ("L4", 23034, 0.290, 890, 13.0, 300.0),
    ("A100 SXM4", 81920, 0.880, 800, 58.0, 2039.0),
)
PLACES = (
    "Sofia, BG",
    "Quebec, CA",
    "Texas, US",
    "California, US",
    "Sweden, SE",
    "Poland, PL",
    "Vietnam, VN",
    "China, CN",
)


@dataclass
class Offer:
    """One ask: the row that a search shows, how its machine behaves ("" is well) and which decoy it is ("" is none)."""

    row: dict[str, Any]
    script: str = ""
    decoy: str = ""
    rented: bool = False

    @property
    def ask_id(self) -> int:
        return self.row["id"]


def offer(ask_id: int, *, script: str = "", decoy: str = "", **fields: Any) -> Offer:
    """A plausible RTX 3090 in Sweden with `fields` replaced."""
    name = fields.get("gpu_name", "RTX 3090")
    gpu = next((gpu for gpu in GPUS if gpu[0] == name), GPUS[1])
    row = _row(ask_id, gpu) | fields
    row["ask_contract_id"] = row["id"]
    return Offer(row, script, decoy)


def _row(ask_id: int, gpu: tuple[Any, ...]) -> dict[str, Any]:
    name, ram_mb, price, capability, dlperf, bandwidth = gpu
    machine_id = 20000 + ask_id % 10000
    return {
        "id": ask_id, "ask_contract_id": ask_id, "bundle_id": ask_id + 5, "bundled_results": None, "machine_id":
        machine_id, "host_id": 40000 + machine_id % 10000, "cluster_id": None, "hostname": None, "public_ipaddr": None,
        "static_ip": False, "direct_port_count": 32, "num_gpus": 1, "gpu_name": name, "gpu_ram": ram_mb,
        "gpu_total_ram": ram_mb, "gpu_frac": 1.0, "gpu_arch": "nvidia", "gpu_ids": [0], "gpu_lanes": 16, "gpu_mem_bw":
        bandwidth, "gpu_max_power": 350.0, "gpu_max_temp": 90.0, "gpu_display_active": False, "compute_cap":
        capability, "cuda_max_good": 12.8, "driver_version": "570.86.15", "driver_vers": 570086015, "bw_nvlink": 0.0,
        "cpu_name": "AMD EPYC 7402", "cpu_arch": "amd64", "cpu_cores": 24, "cpu_cores_effective": 12.0, "cpu_ghz": 2.8,
        "cpu_ram": 64000, "disk_space": 400.0, "disk_bw": 2100.0, "disk_name": "nvme", "inet_up": 480.0, "inet_down":
        820.0, "inet_up_cost": 0.004, "inet_down_cost": 0.004, "internet_up_cost_per_tb": 4.0,
        "internet_down_cost_per_tb": 4.0, "pci_gen": 4.0, "pcie_bw": 22.0, "mobo_name": "H12SSL", "os_version":
        "22.04", "has_avx": 1, "dph_base": price, "dph_total": price, "dph_total_adj": price, "discounted_dph_total":
        price, "discount_rate": 0.0, "credit_discount_max": 0.1, "min_bid": round(price * 0.6, 4), "dlperf": dlperf,
        "dlperf_per_dphtotal": dlperf / price, "total_flops": dlperf * 1.5, "flops_per_dphtotal": dlperf * 1.5 / price,
        "score": round(dlperf / price, 3), "vram_costperhour": price / ram_mb * 1000, "storage_cost": 0.15,
        "storage_total_cost": 0.0, "rentable": True, "rented": False, "is_bid": False, "external": None,
        "hosting_type": 1, "datacenter": True, "geolocation": "Sweden, SE", "geolocode": 1, "reliability": 0.995,
        "reliability2": 0.995, "reliability_mult": 0.99, "expected_reliability": 0.99, "verification": "verified",
        "vericode": 1, "vms_enabled": False, "resource_type": "gpu", "start_date": 0.0, "end_date": None, "duration":
        20 * DAY_S, "time_remaining": "", "time_remaining_isbid": "", "logo": "/static/logos/vastai.svg", "webpage":
        None, "rn": 1,
    }  # fmt: skip


def default_market(seed: int = 7) -> list[Offer]:
    """About ninety ordinary offers, two of them on one machine, and one decoy of each sort. The same for a seed."""
    chance = random.Random(seed)
    offers = []
    for index in range(90):
        gpu = GPUS[index % len(GPUS)]
        price = round(gpu[2] * chance.uniform(0.9, 1.6), 4)
        ordinary = offer(
            7000001 + index * 13, gpu_name=gpu[0], dph_base=price, dph_total=price, min_bid=round(price * 0.6, 4),
            score=round(gpu[4] / price, 3), dlperf_per_dphtotal=gpu[4] / price, machine_id=21000 + index,
            host_id=41000 + index // 2, geolocation=chance.choice(PLACES),
            inet_down=round(chance.uniform(300, 2500), 1),
            inet_up=round(chance.uniform(100, 1500), 1), reliability2=round(chance.uniform(0.985, 0.9995), 4),
            direct_port_count=chance.randrange(8, 200), disk_space=round(chance.uniform(60, 900), 1),
        )  # fmt: skip
        ordinary.row["reliability"] = ordinary.row["reliability2"]
        offers.append(ordinary)
    offers[1].row["machine_id"] = offers[0].row["machine_id"]
    for sparse in offers[5::17]:
        sparse.row.update(cpu_ghz=None, pcie_bw=None, geolocode=None, discount_rate=None)
    return offers + decoys()


def decoys() -> list[Offer]:
    """One trap of each sort, all cheaper than anything honest."""
    trap = {"dph_base": 0.04, "dph_total": 0.04, "score": 900.0}
    return [
        offer(7900001, script="cdi", decoy="cdi", machine_id=29001, host_id=49001, **trap | {"dph_base": 0.02}),
        offer(7900002, decoy="deverified", verification="deverified", machine_id=29002, host_id=49002, **trap),
        offer(
            7900003, decoy="gouging", machine_id=29003, host_id=49003, inet_down_cost=2.0, inet_up_cost=2.0,
            internet_down_cost_per_tb=2000.0, internet_up_cost_per_tb=2000.0, **trap
        ),
        offer(7900004, decoy="portless", direct_port_count=0, machine_id=29004, host_id=49004, **trap),
        offer(7900005, decoy="ending", duration=1200.0, machine_id=29005, host_id=49005, **trap),
    ]  # fmt: skip
