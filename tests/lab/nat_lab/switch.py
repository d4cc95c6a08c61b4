"""The internet of the lab: a process that carries IP packets between the routers' TUN devices.

python -m tests.lab.nat_lab.switch CONTROL_FD JSON: the JSON names each cable's device and addresses. Many kernels have
no netem, so delay, loss and the rest happen here. A change may be asked for ahead of time: it then happens on this
process's clock, between packets, not when somebody's message gets through.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from tests.lab.nat_lab.cable import Cable, Conditions

MAX_PACKET_BYTES = 65536
PACKETS_AT_A_TIME = 64  # from one device before the others get their turn
DIRECTIONS = ("up", "down")  # from the site to the internet, and back
_IPV4 = 4


class Switch:
    def __init__(self, devices: dict[str, int], addresses: dict[str, list[str]], *, seed: int) -> None:
        self._devices = devices
        self._owners = {socket.inet_aton(one): name for name, ones in addresses.items() for one in ones}
        self._cables = {
            (name, direction): Cable(Conditions(), seed=f"{seed} {name} {direction}")
            for name in devices
            for direction in DIRECTIONS
        }
        self._parted: set[tuple[str, str]] = set()  # (from, to)
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.astray = 0  # packets to an address that nobody has

    def run(self, control: socket.socket) -> None:
        """Until the control socket ends."""
        names = {fd: name for name, fd in self._devices.items()}
        sources = [control.fileno(), *names]
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for fd in select.select(sources, [], [], wait_s)[0]:
                if fd in names:
                    self._take(names[fd], fd)
                elif not (message := control.recv(MAX_PACKET_BYTES)):
                    return
                else:
                    control.send(json.dumps(self._obey(json.loads(message))).encode())
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, act, arguments = heapq.heappop(self._due)
                act(*arguments)

    def _at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._due, (when, next(self._order), act, arguments))

    def _take(self, name: str, fd: int) -> None:
        now = time.monotonic()
        for _ in range(PACKETS_AT_A_TIME):
            try:
                packet = os.read(fd, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if len(packet) < 20 or packet[0] >> 4 != _IPV4:
                continue  # IPv6 neighbours announce themselves; nobody here listens
            target = self._owners.get(packet[16:20])
            if target is None:
                self.astray += 1
                continue
            for entered in self._cables[name, "up"].admit(now, len(packet)):
                for arrives in self._cables[target, "down"].admit(entered, len(packet)):
                    if arrives <= now:
                        self._deliver(name, target, packet)
                    else:
                        self._at(arrives, self._deliver, name, target, packet)

    def _deliver(self, source: str, target: str, packet: bytes) -> None:
        cut = self._cables[source, "up"].conditions.cut or self._cables[target, "down"].conditions.cut
        if cut or (source, target) in self._parted:
            self._cables[target, "down"].lost += 1
            return
        with suppress(OSError):  # the device's queue is full, or its router is just going down
            os.write(self._devices[target], packet)

    def _obey(self, request: dict[str, Any]) -> Any:
        match request["op"]:
            case "set" | "part":
                act = self._set if request["op"] == "set" else self._part
                if request["after_s"] > 0:
                    self._at(time.monotonic() + request["after_s"], act, request)
                else:
                    act(request)
                return {}
            case "conditions":
                return asdict(self._cables[request["name"], request["direction"]].conditions)
            case "counts":
                return {direction: self._cables[request["name"], direction].counts() for direction in DIRECTIONS}
            case other:
                return {"error": f"no such request: {other!r}"}

    def _set(self, request: dict[str, Any]) -> None:
        for direction in request["directions"]:
            cable = self._cables[request["name"], direction]
            cable.conditions = replace(cable.conditions, **request["conditions"])

    def _part(self, request: dict[str, Any]) -> None:
        one, other = request["pair"]
        for pair in ((one, other), (other, one)):
            (self._parted.add if request["apart"] else self._parted.discard)(pair)


def main(control_fd: int, task: dict[str, Any]) -> None:
    switch = Switch(task["devices"], task["addresses"], seed=task["seed"])
    with socket.socket(fileno=control_fd) as control:
        switch.run(control)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
