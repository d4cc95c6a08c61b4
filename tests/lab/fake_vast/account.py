"""The account: offers, instances, what they cost. Every verb takes `now`; no HTTP and no clock here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.lab.fake_vast import billing, order
from tests.lab.fake_vast.instances import Instance, Phase, timeline
from tests.lab.fake_vast.market import Offer, offer
from tests.lab.fake_vast.records import instance_row, wanted_ports

FIRST_ID, FIRST_DECOY_ID = 30000001, 21000001
LAG_S = 30.0  # what the fault list.lag hides and keeps
LINGER_READS = 2  # a destroyed instance is still shown, unloaded, by so many reads
INVISIBLE_READS = 3
IMAGE_GB = {"python:3.12-slim": 0.046, "docker.io/library/python:3.12-slim": 0.046}
OTHER_IMAGE_GB = 1.2


class Account:
    """One account on the fake service. `ports` hands out free external ports on an address, by protocol;
    `addresses` the n-th host's public address."""

    def __init__(
        self,
        *,
        offers: Sequence[Offer],
        ports: Callable[[str, str], int],
        addresses: Callable[[int], str],
        credit: float,
        seed: int = 1,
    ) -> None:
        self.offers = {one.ask_id: one for one in offers}
        self.instances: dict[int, Instance] = {}
        self.credit = credit
        self.decoys_touched = 0
        self._ports, self._addresses = ports, addresses
        self._random = random.Random(seed)
        self._next_id = FIRST_ID
        self._hosts: dict[int, int] = {}

    # Renting

    def create(
        self, ask: Offer, body: dict[str, Any], *, now: float, script: str = "", invisible_reads: int = 0
    ) -> Instance:
        """Rent the ask; it can be used this once."""
        ask.rented = True
        self._next_id += self._random.randrange(1, 90)
        bid = body.get("price")
        wanted = wanted_ports(body["env"])
        script = script or ask.script
        if not script and not order.start_is_executable(body):
            script = "oci"
        if not script and len(wanted) > ask.row["direct_port_count"]:
            script = "no-ports"
        image_gb = IMAGE_GB.get(body["image"], OTHER_IMAGE_GB)
        address = self.address_of(ask)
        instance = Instance(
            id=self._next_id,
            offer=ask,
            dph_gpu=ask.row["dph_base"] if bid is None else bid,
            body=body,
            created_at=now,
            api_key=f"{self._random.getrandbits(256):064x}",
            image_gb=image_gb,
            phases=timeline(script, body, ask, now=now, image_gb=image_gb),
            script=script,
            is_bid=bid is not None,
            address=address,
            ports={f"{number}/{protocol}": self._ports(address, protocol) for number, protocol in wanted},
            invisible_reads=invisible_reads,
        )
        self.instances[instance.id] = instance
        return instance

    def address_of(self, ask: Offer) -> str:
        """The host's public address: its machines share one."""
        return self._addresses(self._hosts.setdefault(ask.row["host_id"], len(self._hosts)))

    def add_decoys(self, labels: Sequence[str | None], *, now: float) -> None:
        """Foreign instances that were running long before the client came."""
        for index, label in enumerate(labels):
            row_id = FIRST_DECOY_ID + index * 7
            body = {"label": label, "image": "pytorch/pytorch", "disk": 40.0, "env": {}, "runtype": "ssh"}
            began = now - 86400.0 - index
            self.instances[row_id] = Instance(
                id=row_id, offer=offer(row_id + 1), dph_gpu=0.2, body=body, created_at=began, api_key=f"{row_id:064x}",
                image_gb=0.0, ours=False,
                phases=[Phase(at=began, status="running", msg="success, running pytorch/ssh", ports=True)],
            )  # fmt: skip

    # Reading. Each read counts against what a fault hides or keeps.

    def read(self, instance_id: int, *, now: float) -> dict[str, Any] | None:
        """The row of a single read, None for what is unknown, gone or not visible yet."""
        instance = self.instances.get(instance_id)
        if instance is None or not self._visible(instance, now):
            return None
        return instance_row(instance, now)

    def rows(self, *, now: float, lagging: bool = False) -> list[dict[str, Any]]:
        """Every row of the list, by id. Lagging: what it showed some time ago."""
        then = now - LAG_S if lagging else now
        shown = []
        for instance in sorted(self.instances.values(), key=lambda one: one.id):
            lately_gone = lagging and instance.destroyed_at is not None and instance.destroyed_at > then
            if lately_gone or (instance.created_at <= then and self._visible(instance, now)):
                shown.append(instance_row(instance, now) | {"volume_info": []})
        return shown

    def _visible(self, instance: Instance, now: float) -> bool:
        if instance.invisible_reads > 0:
            instance.invisible_reads -= 1
            return False
        if instance.is_live:
            return instance.phase(now).shown
        if instance.linger_reads > 0:
            instance.linger_reads -= 1
            return True
        return False

    # Changing

    def find(self, instance_id: int, *, now: float) -> Instance | None:
        """The instance that a command means: live and not vanished."""
        instance = self.instances.get(instance_id)
        return instance if instance and instance.is_live and instance.phase(now).shown else None

    def touch(self, instance: Instance) -> None:
        """Note that a command reached this instance; foreign ones are counted."""
        if not instance.ours:
            self.decoys_touched += 1

    def settle(self, now: float) -> None:
        """What time alone does: the credit runs out, vanished contracts end."""
        for instance in self.instances.values():
            phase = instance.phase(now)
            if instance.is_live and not phase.shown:
                instance.destroyed_at, instance.linger_reads = phase.at, 0
        if self.credit_left(now) <= 0:
            for instance in self.ours():
                if instance.is_live and instance.phase(now).cur == "running":
                    instance.strike("credit-stop", now)

    # Accounts

    def ours(self) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.ours]

    def credit_left(self, now: float) -> float:
        return self.credit - sum(billing.dollars(instance, now) for instance in self.ours())

    def rentals(self, now: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(live, ended) lines of the billing ledger."""
        lines = [billing.rental(instance, now) for instance in self.ours()]
        return [line for line in lines if line["end"] is None], [line for line in lines if line["end"] is not None]
