"""`with FakeVast() as fake:` a vast.ai on loopback, with time, faults and the bill in the test's hands."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from tests.lab.fake_vast.account import Account
from tests.lab.fake_vast.clock import Clock
from tests.lab.fake_vast.containers import Containers
from tests.lab.fake_vast.faults import FaultBox
from tests.lab.fake_vast.host import Hosts
from tests.lab.fake_vast.inside import Inside
from tests.lab.fake_vast.instances import START_S, Instance
from tests.lab.fake_vast.market import Offer, default_market
from tests.lab.fake_vast.replies import Request
from tests.lab.fake_vast.server import Listener, open_api
from tests.lab.fake_vast.service import Hook, Service

NET_CLAIM_PORT = 33333  # bound on an address that no host gets
# Foreign instances that share the account: no label, another label, prefix-like labels, another run's live rental.
DECOY_LABELS: tuple[str | None, ...] = (
    None,
    "train-7b",
    "ppsmoke2-3f2a-0-9c1d-{later}",
    "ppsmoke",
    "ppsmoke-77aa55cc-0-1b2c3d4e-{later}",
)


class FakeVast:
    """The fake service while its block lasts.

    scale: fake seconds per real second; 0 (the default): time stands still but for fake.clock.advance().
    inside: what containers run in (inside.Inside); None: nothing really runs. folder: where their files go.
    enforce_limits: answer 429 to calls that come sooner than documented; they are counted in any case.
    """

    def __init__(
        self,
        *,
        key: str = "test-key",
        port: int = 0,
        scale: float = 0.0,
        start: float | None = None,
        offers: Sequence[Offer] | None = None,
        decoys: Sequence[str | None] = DECOY_LABELS,
        credit: float = 25.0,
        enforce_limits: bool = False,
        bad_key_status: int = 404,
        bulk: bool = False,
        seed: int = 1,
        inside: Inside | None = None,
        folder: Path | None = None,
    ) -> None:
        self.key = key
        self._inside, self._folder = inside, folder
        self._hosts: Hosts | None = None
        self._containers: Containers | None = None
        self._ports_given: set[int] = set()
        self._closing = ExitStack()
        self._net = 77 if inside is None or sys.platform != "linux" else self._own_net()
        self.clock = Clock(scale=scale, start=start)
        self._faults = FaultBox()
        self._port = port
        offers = default_market() if offers is None else offers
        self._account = Account(
            offers=offers, ports=self._free_port, addresses=self._address_of, credit=credit, seed=seed
        )
        now = self.clock.now()
        later = int(now) + 7200
        self._account.add_decoys([label and label.format(later=later) for label in decoys], now=now)
        self.service = Service(
            self._account,
            self.clock,
            key=key,
            faults=self._faults,
            logs_of=self._logs_of,
            enforce_limits=enforce_limits,
            bad_key_status=bad_key_status,
            bulk=bulk,
        )
        self._listeners: list[Listener] = []

    def __enter__(self) -> FakeVast:
        elsewhere = Listener(self.service.handle_elsewhere, self.clock.now)
        self._listeners.append(elsewhere)
        self.service.elsewhere = elsewhere.url
        self._listeners.append(open_api(self.service, self._port))
        for listener in self._listeners:
            listener.start()
            self._closing.callback(listener.stop)
        if self._inside is not None:
            folder = self._folder or Path(self._closing.enter_context(TemporaryDirectory(prefix="fake-vast-")))
            api = ("127.0.0.1", self._listeners[1].port)
            self._containers = Containers(self._inside, folder=folder, api=api)
            self._hosts = Hosts(self._account, self.clock, self.service.lock, self._containers)
            self._closing.callback(self._hosts.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def url(self) -> str:
        return self._listeners[1].url

    @property
    def requests(self) -> list[Request]:
        """Every call to the API so far, in order of arrival, keys redacted."""
        return list(self.service.requests)

    def fault(self, name: str, count: int | None = 1, *, skip: int = 0, machine_id: int | None = None) -> None:
        """Arm a fault of the catalogue for the next `count` calls (None: all) after `skip` good ones."""
        self._faults.arm(name, count, skip=skip, machine_id=machine_id)

    def clear_fault(self, name: str) -> None:
        self._faults.disarm(name)

    def unused_faults(self) -> list[str]:
        return self._faults.unused()

    def on(self, route: str, moment: str, hook: Hook) -> None:
        """Call hook(request, instance id or None) at the "arrival" of each call on the route, before any fault strikes
        it, "before" its effect or "after" it. The call goes on when the hook returns."""
        self.service.on(route, moment, hook)

    def strike(self, instance_id: int, name: str) -> None:
        """Let it befall a running instance now: offline, unknown, outbid, credit-stop, vanish or false-exited."""
        with self.service.lock:
            self._account.instances[instance_id].strike(name, self.clock.now())

    def cut(self, instance_id: int, **changes: Any) -> None:
        """Let nothing more become of an instance by itself; its phase (instances.Phase) goes on with these changes."""
        with self.service.lock:
            self._account.instances[instance_id].cut(self.clock.now(), **changes)

    def come_up(self, instance_id: int) -> None:
        """Let an instance whose start hung go on to run."""
        with self.service.lock:
            self._account.instances[instance_id].start(self.clock.now(), after_s=START_S)

    def hold(self, instance_id: int, name: str) -> None:
        """Have a "pip" or "node" of the instance stand still at its start, which must be yet to come."""
        if self._containers is None:
            raise RuntimeError("this fake runs no containers")
        self._containers.hold(instance_id, name)

    def let_go(self, instance_id: int, name: str) -> None:
        """End a hold, if there is one."""
        if self._containers is not None:
            self._containers.let_go(instance_id, name)

    def ledger(self) -> dict[str, Any]:
        """The bill and the request log, as GET /_lab/ledger shows them."""
        return self.service.ledger()

    def instance(self, instance_id: int) -> Instance:
        return self._account.instances[instance_id]

    def log(self, instance_id: int) -> str:
        """What the instance's container has printed so far."""
        return self._logs_of(instance_id).decode(errors="replace")

    def pids(self, instance_id: int) -> list[int]:
        """The processes of a running container, as this host numbers them, parents first."""
        if self._containers is None:
            raise RuntimeError("this fake runs no containers")
        return self._containers.pids(instance_id)

    @property
    def isolation(self) -> str:
        """How containers run here: "namespace", "plain" or "none"."""
        return "none" if self._containers is None else self._containers.isolation

    @property
    def offers(self) -> list[Offer]:
        return list(self._account.offers.values())

    def _logs_of(self, instance_id: int) -> bytes:
        if self._containers is None:
            return f"container {instance_id}: no container runs in this fake\n".encode()
        return self._containers.log(instance_id)

    def _free_port(self, address: str, protocol: str) -> int:
        """A number below the ephemeral range that is free on the address, and was not given before."""
        kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
        while True:
            port = random.randrange(20000, 32000)
            if port in self._ports_given:
                continue
            with socket.socket(socket.AF_INET, kind) as probe:
                try:
                    probe.bind((address, port))
                except OSError:
                    continue
            self._ports_given.add(port)
            return port

    def _own_net(self) -> int:
        """N of 127.N.0.0/16, which no other fake on this machine takes while this one lasts."""
        while True:
            net, claim = random.randrange(64, 250), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                claim.bind((f"127.{net}.255.254", NET_CLAIM_PORT))
            except OSError:
                claim.close()
                continue
            self._closing.enter_context(claim)
            return net

    def _address_of(self, number: int) -> str:
        """A loopback address for the n-th host; elsewhere than on Linux only 127.0.0.1 is up."""
        return f"127.{self._net}.{number // 250}.{number % 250 + 1}" if sys.platform == "linux" else "127.0.0.1"
