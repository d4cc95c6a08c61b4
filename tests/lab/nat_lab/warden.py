"""The first process of the lab's private namespaces: builds the sites, starts processes in them, and takes all along.

python -m tests.lab.nat_lab.warden CONTROL_FD SWITCH_FD. Requests come over the control socket, one packet each. When
that socket ends, so does this process; and with the first process of a process namespace the kernel ends every other,
with the last process the network namespaces, their devices and rules are gone too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from tests.lab.nat_lab.kernel import NETNS, LabError, command, forget_connections, inside, open_tun
from tests.lab.nat_lab.rules import ruleset
from tests.lab.nat_lab.spec import Host, Plan, Site
from tests.lab.nat_lab.wire import MAX_MESSAGE_BYTES, read_site

SWITCH = (sys.executable, "-m", "tests.lab.nat_lab.switch")


class Warden:
    def __init__(self, switch_fd: int) -> None:
        self._switch_fd = switch_fd
        self._plan = Plan([Site(hosts=("nobody",))])
        self._seed = 0
        self._children: dict[int, tuple[subprocess.Popen[bytes], int]] = {}  # by pid: the process, where its end goes

    def serve(self, control: socket.socket) -> None:
        """Until the control socket ends."""
        woken, waking = socket.socketpair()
        for one in (woken, waking):
            one.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waking.fileno())
        while True:
            readable, _, _ = select.select([control, woken], [], [])
            if woken in readable:
                woken.recv(4096)
            self._reap()
            if control not in readable:
                continue
            message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 4)
            if not message:
                return
            self._answer(control, json.loads(message), fds)

    def _answer(self, control: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        sent: list[int] = []
        try:
            answer, sent = self._obey(request, fds)
        except (LabError, OSError, ValueError) as error:
            answer = {"error": f"{request['op']}: {error}"}
        finally:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)
        socket.send_fds(control, [json.dumps(answer).encode()], sent)
        for fd in sent:
            os.close(fd)

    def _obey(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        match request["op"]:
            case "build":
                self._seed = request["seed"]
                self._build([read_site(site) for site in request["sites"]])
            case "rebuild":
                self._rebuild(read_site(request["site"]))
            case "forget":
                with inside(_router(request["site"])):
                    forget_connections()
            case "spawn":
                return self._spawn(request, *fds)
            case other:
                raise ValueError(f"no such request: {other!r}")
        return {}, []

    # --- sites

    def _build(self, sites: list[Site]) -> None:
        _private_folder()
        command("ip", "link", "set", "lo", "up")
        self._plan = Plan(sites)
        lines = []
        for site in sites:
            lines.append(f"netns add {_router(site.name)}")
            for host in self._plan.hosts(site.name):
                lines.append(f"netns add {host.name}")
                ends = f"name eth0 netns {host.name} type veth peer name lan{host.index}"
                lines.append(f"link add {ends} netns {_router(site.name)}")
        _ip(lines)
        devices = {}
        for site in sites:
            with inside(_router(site.name)):
                devices[site.name] = open_tun("wan")
        self._start_switch(devices)
        for site in sites:
            self._furnish_router(site)
            for host in self._plan.hosts(site.name):
                self._furnish_host(host)

    def _start_switch(self, devices: dict[str, int]) -> None:
        addresses = {name: self._plan.addresses(name) for name in devices}
        task = {"devices": devices, "addresses": addresses, "seed": self._seed}
        fds = [self._switch_fd, *devices.values()]
        process = subprocess.Popen([*SWITCH, str(self._switch_fd), json.dumps(task)], pass_fds=fds)
        self._children[process.pid] = (process, -1)
        for fd in fds:
            os.close(fd)

    def _furnish_router(self, site: Site) -> None:
        lines = ["link set lo up", f"addr add {self._plan.router_address(site.name)}/32 dev wan", "link set wan up"]
        lines.append("route add default dev wan")
        for host in self._plan.hosts(site.name):
            lan = f"lan{host.index}"
            lines += [f"addr add {host.gateway}/32 dev {lan}", f"link set {lan} up"]
        _ip(lines, _router(site.name))
        with inside(_router(site.name)):
            _write("/proc/sys/net/ipv4/ip_forward", "1")
        self._put_in_force(site)

    def _put_in_force(self, site: Site) -> None:
        """The site's rules, and its routes to its hosts' addresses, which depend on its type."""
        hosts = self._plan.hosts(site.name)
        _ip([f"route replace {host.own}/32 dev lan{host.index}" for host in hosts], _router(site.name))
        with inside(_router(site.name)):
            command("nft", "-f", "-", text=ruleset(site, hosts, seed=self._seed))

    def _furnish_host(self, host: Host) -> None:
        lines = ["link set lo up", f"addr add {host.own}/32 dev eth0", "link set eth0 up"]
        lines += [f"route add {host.gateway}/32 dev eth0", f"route add default via {host.gateway} src {host.own}"]
        _ip(lines, host.name)

    def _rebuild(self, site: Site) -> None:
        before = self._plan
        self._plan = before.with_site(site)
        self._put_in_force(site)
        for host in self._plan.hosts(site.name):
            old = before.host(host.name).own
            if old != host.own:
                route = f"route replace default via {host.gateway} src {host.own}"
                _ip([f"addr add {host.own}/32 dev eth0", route, f"addr del {old}/32 dev eth0"], host.name)
        with inside(_router(site.name)):
            forget_connections()

    # --- processes

    def _spawn(
        self, request: dict[str, Any], stdin: int, stdout: int, stderr: int, end: int
    ) -> tuple[dict[str, Any], list[int]]:
        """A process in a host's namespace, at the head of its own session. `end` is told its exit status."""
        with inside(request["host"]):
            process = subprocess.Popen(
                request["args"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=request["cwd"],
                env=request["env"],
                start_new_session=True,
            )
        self._children[process.pid] = (process, os.dup(end))
        return {"pid": process.pid}, [os.pidfd_open(process.pid)]

    def _reap(self) -> None:
        """Every child that has ended, and every orphan: those are ours as well."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process, end = self._children.pop(pid, (None, -1))
            if process is not None:
                process.returncode = os.waitstatus_to_exitcode(status)
                if end >= 0:
                    with suppress(OSError):
                        os.write(end, str(process.returncode).encode())
                    os.close(end)


def _router(site: str) -> str:
    return f"router-{site}"


def _ip(lines: Iterable[str], namespace: str = "") -> None:
    where = ("-n", namespace) if namespace else ()
    command("ip", *where, "-batch", "-", text="\n".join(lines) + "\n")


def _private_folder() -> None:
    """A place for names of namespaces that no other process sees."""
    if not os.path.isdir(NETNS):
        command("mount", "-t", "tmpfs", "lab", os.path.dirname(NETNS))
        os.mkdir(NETNS)
    command("mount", "-t", "tmpfs", "lab", NETNS)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def main(control_fd: int, switch_fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for whoever uses the lab
    with socket.socket(fileno=control_fd) as control:
        Warden(switch_fd).serve(control)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
