"""What the hosts do on their own: a thread that starts and ends containers as the instances' timelines say."""

from __future__ import annotations

import threading

from tests.lab.fake_vast.account import Account
from tests.lab.fake_vast.clock import Clock
from tests.lab.fake_vast.containers import Containers

PASS_S = 0.05  # real seconds between two looks at the timelines


class Hosts:
    """Keeps what runs in step with what should run. The account is read and changed under `lock`."""

    def __init__(self, account: Account, clock: Clock, lock: threading.RLock, containers: Containers) -> None:
        self._account, self._clock, self._lock, self._containers = account, clock, lock, containers
        self._closing = threading.Event()
        self._since: dict[int, float] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake vast.ai: hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every container. Raises what went wrong in the thread, if anything did."""
        self._closing.set()
        self._thread.join()
        self._containers.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._closing.wait(PASS_S):
                self._step()
        except BaseException as error:
            self._failure = error
            raise

    def _step(self) -> None:
        """One look: end what should not run, note what ended by itself, start what should."""
        with self._lock:
            now = self._clock.now()
            self._account.settle(now)
            since = {one.id: one.serving_since(now) for one in self._account.ours()}
        for instance_id in [one for one in self._containers.running() if since[one] != self._since[one]]:
            self._containers.stop(instance_id)
        for instance_id, status in self._containers.ended():
            with self._lock:
                instance, now = self._account.instances[instance_id], self._clock.now()
                if instance.serving_since(now) is not None:
                    instance.exited(now, status)
            since[instance_id] = None
        for instance_id, began in since.items():
            if began is not None and instance_id not in self._containers.running():
                self._since[instance_id] = began
                self._start(instance_id)

    def _start(self, instance_id: int) -> None:
        instance = self._account.instances[instance_id]
        try:
            self._containers.start(instance, reachable=instance.phase(self._clock.now()).reachable)
        except OSError as error:
            with self._lock:
                failed = {
                    "status": "created",
                    "cur": "stopped",
                    "intended": "stopped",
                    "serving": False,
                    "ports": False,
                }
                instance.cut(self._clock.now(), msg=f"OCI runtime create failed: {error}", **failed)
