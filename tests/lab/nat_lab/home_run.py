"""`python -m ppsmoke` at home, whose stages are elsewhere in the lab: the product's own command with another fleet.

python -m tests.lab.nat_lab.home_run SOCKET [ARGUMENT...]. Over the socket (in the file system, which namespaces do not
part) it hands each stage's specification to the lab and is told where that stage can be dialled. Like a rented
machine's, a stage's end is seen by nothing but what comes, or no longer comes, over the network.

A laptop that is suspended: `time.monotonic` stands still by as many seconds as the file SUSPENDED says, read anew
whenever this process is continued. As on Linux, the clock that counts such times (CLOCK_BOOTTIME) and the wall's go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

from ppsmoke import cli
from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.gathering import REACH_WITHIN_S
from ppsmoke.errors import SmokeError
from ppsmoke.rent.fleet import Endpoints, SpecOf
from ppsmoke.report.progress import Progress
from ppsmoke.waiting import Deadline

SUSPENDED = "LAB_SUSPENDED"  # the variable that names the file


class PlacedFleet:
    """Stages that somebody else starts, from our specifications."""

    listen_host = "0.0.0.0"
    destroy_budget_s = 10.0
    reach_within_s = REACH_WITHIN_S

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._endpoints = Endpoints()

    async def rent(self, num_stages: int, spec_of: SpecOf, deadline: Deadline) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket_path)
        try:
            for stage in range(num_stages):
                spec = spec_of(stage, 0)
                told = {"stage": stage, "environment": dict(spec.environment), "certs": spec.certificates_json()}
                told["node_id"] = spec.identity.node_id
                writer.write(json.dumps(told).encode() + b"\n")
            for _ in range(num_stages):
                where = await deadline.wait(reader.readline(), doing="waiting for a stage")
                self._endpoints.put(Endpoint(**json.loads(where)))
        finally:
            writer.close()

    def endpoints(self) -> AsyncIterator[Endpoint]:
        return self._endpoints.each()

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    def link_changed(self, node_id: str, *, up: bool) -> None:
        """There is nobody else to look at."""

    def failing(self, error: SmokeError) -> None:
        """Ending takes no time."""

    async def logs(self, stage: int | None) -> str:
        return ""

    async def destroy_all(self) -> None:
        """The lab does it."""


class _Suspendable:
    """The monotonic clock of a machine that sleeps now and then."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._real = time.monotonic
        self._slept_s = 0.0
        time.monotonic = self
        signal.signal(signal.SIGCONT, self._wake)

    def __call__(self) -> float:
        return self._real() - self._slept_s

    def _wake(self, number: int, frame: Any) -> None:
        self._slept_s = float(self._file.read_text() or 0)


def main(socket_path: str, arguments: list[str]) -> int:
    if file := os.environ.get(SUSPENDED):
        _Suspendable(Path(file))

    def open_fleet(progress: Progress) -> PlacedFleet:
        return PlacedFleet(socket_path)

    cli._open_loopback = open_fleet
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
