"""Containers as process trees: one gate process each, in namespaces of their own where that is allowed.

A namespace vanishes with its first process, and the gate ends when this process does, however it ends: nothing is left
to clean. Ports are mapped in user space (forward.py), so neither the host's firewall nor its routes are touched.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.lab.fake_vast import rootfs
from tests.lab.fake_vast.forward import Address, Dial, LoopThread, TcpPort, UdpPort
from tests.lab.fake_vast.gate import descendants
from tests.lab.fake_vast.inside import PIP_PROXY_PORT, Inside, Python, environment, listens_on, make_home, start_argv
from tests.lab.fake_vast.instances import Instance
from tests.lab.fake_vast.proxy import ConnectProxy

GATE = Path(__file__).with_name("gate.py")
START_WITHIN_S, END_WITHIN_S = 60.0, 10.0
_AS_ROOT = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
_AS_USER = ["unshare", "--user", "--map-root-user", *_AS_ROOT[1:]]


def way_in(isolation: str) -> list[str] | None:
    """The command that enters new namespaces, None for plain processes. Raises RuntimeError if asked for in vain."""
    if isolation == "plain":
        return None
    if sys.platform == "linux":
        for command in (_AS_ROOT, _AS_USER):
            try:
                done = subprocess.run([*command, "true"], capture_output=True, timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                return command
    if isolation == "namespace":
        raise RuntimeError("no network namespaces here: neither root nor user namespaces")
    return None


class Gate:
    """This side of a gate process; its calls block and may come from any thread."""

    def __init__(self, command: list[str] | None) -> None:
        self._ours, theirs = socket.socketpair()
        argv = [sys.executable, "-I", "-S", str(GATE), str(theirs.fileno()), "isolated" if command else "plain"]
        self.process = subprocess.Popen(
            [*(command or []), *argv], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._ours.settimeout(START_WITHIN_S)
        self._lock = threading.Lock()

    def order(self, op: str, **fields: Any) -> socket.socket | None:
        """Carry out an order; its socket, if it makes one. Raises OSError with what went wrong there."""
        with self._lock:
            self._ours.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
            data, fds, _, _ = socket.recv_fds(self._ours, 1 << 16, 1)
            while data and not data.endswith(b"\n"):
                more = self._ours.recv(1 << 16)
                data = data + more if more else b""
        if not data:
            raise ConnectionError("the container has ended")
        made = socket.socket(fileno=fds[0]) if fds else None
        if (error := json.loads(data).get("error")) is not None:
            if made:
                made.close()
            raise OSError(error)
        return made

    def make(self, op: str, **fields: Any) -> socket.socket:
        made = self.order(op, **fields)
        if made is None:
            raise OSError(f"the gate made no socket for {op}")
        return made

    def close(self) -> None:
        """End the container and wait until it has ended."""
        with self._lock:  # an order under way is answered first
            self._ours.close()
        try:
            self.process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_WITHIN_S)


@dataclass
class Container:
    """One running container and the ports that belong to it: its own mappings, and what leads to or out of it."""

    instance: Instance
    gate: Gate
    address: str  # where its services listen: 127.0.0.1 in a namespace, an address of its own on a shared host
    log: Path
    reachable: bool  # do its mapped ports lead to it?
    ports: list[TcpPort | UdpPort] = field(default_factory=list)

    def dial(self, name: str) -> Dial:
        """Connections into the container for the mapping "7070/tcp", from whoever calls."""
        target = [self.address, listens_on(name, self.instance.ports[name])]
        udp = name.endswith("/udp")

        async def connect(caller: Address) -> socket.socket:
            fields = {"source": list(caller)} if udp else {"source": caller[0]}
            make = partial(self.gate.make, "udp" if udp else "connect", target=target, **fields)
            return await asyncio.get_running_loop().run_in_executor(None, make)

        return connect


class Containers:
    """Every container of a fake; start, stop and ended are called by one thread at a time."""

    def __init__(self, inside: Inside, *, folder: Path, api: Address) -> None:
        self._inside, self._folder = inside, folder
        self._command = way_in(inside.isolation)
        if inside.chroot and self._command is None:
            raise RuntimeError("a chroot needs namespaces: root or user namespaces")
        self._python = Python.ask(inside.python)
        self._net = LoopThread()
        self._proxy = self._net.call(ConnectProxy.open()) if self._isolated else None
        self._outside = [(api, api), *((one, one) for one in inside.reach)]
        if self._proxy:
            self._outside.append((("127.0.0.1", PIP_PROXY_PORT), self._proxy.address))
        self._running: dict[int, Container] = {}
        self._inner_addresses = iter(f"127.78.{os.getpid() % 250}.{number}" for number in range(1, 250))

    @property
    def _isolated(self) -> bool:
        return self._command is not None

    @property
    def isolation(self) -> Literal["namespace", "plain"]:
        return "namespace" if self._isolated else "plain"

    def running(self) -> set[int]:
        return set(self._running)

    def start(self, instance: Instance, *, reachable: bool) -> None:
        """Run its start command, its ports mapped first. Raises OSError if it cannot be started."""
        folder = self._folder / str(instance.id)
        make_home(folder, self._python, pip=self._inside.pip)
        address = "127.0.0.1" if self._isolated or sys.platform != "linux" else next(self._inner_addresses)
        container = Container(instance, Gate(self._command), address, folder / "log", reachable)
        self._running[instance.id] = container
        try:
            self._connect(container)
            container.gate.order("start", **self._orders(container, folder))
        except BaseException:
            self.stop(instance.id)
            raise

    def hold(self, instance_id: int, name: str) -> None:
        """From now on a "pip" or "node" that starts in there stands still before its first line."""
        folder = self._folder / str(instance_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"hold-{name}").touch()

    def let_go(self, instance_id: int, name: str) -> None:
        (self._folder / str(instance_id) / f"hold-{name}").unlink(missing_ok=True)

    def stop(self, instance_id: int) -> None:
        """End the container and all its processes, and free its ports."""
        container = self._running.pop(instance_id)
        container.gate.close()
        self._net.call(_close_all(container.ports))

    def ended(self) -> list[tuple[int, int]]:
        """(instance, exit status) of the containers whose start command has ended by itself; they are gone then."""
        done = [(one.instance.id, one.gate.process.poll()) for one in self._running.values()]
        ended = [(instance_id, status) for instance_id, status in done if status is not None]
        for instance_id, _ in ended:
            self.stop(instance_id)
        return ended

    def log(self, instance_id: int, *, max_bytes: int = 1 << 20) -> bytes:
        """The end of what the container printed."""
        path = self._folder / str(instance_id) / "log"
        if not path.exists():
            return b""
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return file.read()

    def pids(self, instance_id: int) -> list[int]:
        """The container's processes as this host numbers them, parents first, without the machinery around them."""
        found = descendants(self._running[instance_id].gate.process.pid)
        return [pid for pid in found if not _is_machinery(pid)]

    def close(self) -> None:
        for instance_id in list(self._running):
            self.stop(instance_id)
        if self._proxy:
            self._net.call(self._proxy.close())
        self._net.close()

    def _orders(self, container: Container, folder: Path) -> dict[str, Any]:
        inside, argv = self._inside, start_argv(container.instance.body)
        env = environment(container.instance, inside, folder=folder, address=container.address, isolated=self._isolated)
        setup: list[list[str]] = []
        if not inside.chroot and shutil.which(argv[0], path=env["PATH"]) is None:
            raise OSError(f'exec: "{argv[0]}": executable file not found in $PATH: unknown')
        if inside.chroot:
            root = folder / "root"
            root.mkdir(exist_ok=True)
            setup = rootfs.setup(root, self._python, wheels=inside.wheels, inject=inside.inject)
            argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", f"--root={root}", "--wd=/", *argv]
        elif self._isolated:
            argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *argv]
        return {"setup": setup, "argv": argv, "env": env, "cwd": str(folder / "home"), "log": str(container.log)}

    def _connect(self, new: Container) -> None:
        """Its mapped ports, here and in every container (itself too); and from inside it, the ports of all others."""
        drop = new.instance.script == "udp-filtered"
        if new.reachable:
            for name, external in new.instance.ports.items():
                self._open(new, name, _bind(name, (new.instance.address, external)), new.dial(name), drop=drop)
        if not self._isolated:
            return
        for listen, target in self._outside:
            bound = new.gate.make("listen", address=list(listen))
            self._open(new, "/tcp", bound, partial(_dial_outside, target))
        self._lead(new, new, owner=new)
        for other in self._running.values():
            if other is not new:
                self._lead(new, other, owner=new)
                with suppress(OSError):  # the other one may be ending
                    self._lead(other, new, owner=new)

    def _lead(self, inside: Container, to: Container, *, owner: Container) -> None:
        """From inside one container to the public ports of another, whose caller then is the one's public address."""
        if not to.reachable or to.instance.script == "no-hairpin":
            return
        for name, external in to.instance.ports.items():
            udp = name.endswith("/udp")
            fields = {"source" if udp else "address": [to.instance.address, external]}
            bound = inside.gate.make("udp" if udp else "listen", **fields)
            dial = partial(_as_from, (inside.instance.address, 0), to.dial(name))
            self._open(owner, name, bound, dial, drop=to.instance.script == "udp-filtered")

    def _open(self, owner: Container, name: str, bound: socket.socket, dial: Dial, *, drop: bool = False) -> None:
        udp = name.endswith("/udp")
        opening = UdpPort.open(bound, dial, drop=drop) if udp else TcpPort.open(bound, dial)
        owner.ports.append(self._net.call(opening))


def _is_machinery(pid: int) -> bool:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
    return argv[0] == b"unshare" or os.fsencode(GATE) in argv


def _bind(name: str, address: Address) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if name.endswith("/udp") else socket.SOCK_STREAM)
    if not name.endswith("/udp"):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    bound.bind(address)
    return bound


async def _as_from(source: Address, dial: Dial, _: Address) -> socket.socket:
    return await dial(source)


async def _dial_outside(target: Address, _: Address) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, target)
    except BaseException:
        made.close()
        raise
    return made


async def _close_all(ports: list[TcpPort | UdpPort]) -> None:
    for port in ports:
        await port.close()
