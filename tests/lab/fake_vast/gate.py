"""A container's gate: runs the start command, and makes sockets where the container's are, for the fake to use.

A script of its own (standard library alone, started by containers.py inside the container's namespaces). It reads one
JSON object a line from the socket whose number is its argument and answers each with one line and at most one file
descriptor. It ends, and everything it started with it, when that socket closes or the start command ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
PR_SET_CHILD_SUBREAPER = 36
CONNECT_WITHIN_S = 2.0  # to a loopback address of its own


class Gate:
    def __init__(self, control: socket.socket, *, isolated: bool) -> None:
        self._control = control
        self._isolated = isolated
        self._child = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._wake, wake_write = os.pipe()
        for fd in (self._wake, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        pending = b""
        while True:
            readable, _, _ = select.select([self._control, self._wake], [], [])
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()
            if self._control in readable:
                data = self._control.recv(1 << 16)
                if not data:
                    self._end(137)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))

    def _answer(self, order: dict[str, Any]) -> None:
        made: list[socket.socket] = []
        try:
            reply = getattr(self, "on_" + order.pop("op"))(made, **order)
        except (OSError, subprocess.SubprocessError) as error:
            reply = {"error": str(error)}
        socket.send_fds(self._control, [json.dumps(reply).encode() + b"\n"], [one.fileno() for one in made])
        for one in made:
            one.close()

    # Orders

    def on_start(
        self,
        made: list[socket.socket],
        setup: list[list[str]],
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        log: str,
    ) -> dict[str, Any]:
        """Prepare with the setup commands, then run argv; its output goes to the log."""
        with open(log, "ab") as output:
            for command in setup:
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            child = subprocess.Popen(
                argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._child, self._process = child.pid, child  # kept: a Popen that is dropped may reap in our place
        return {"pid": child.pid}

    def on_connect(self, made: list[socket.socket], source: str, target: list[Any]) -> dict[str, Any]:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.append(one)
        one.settimeout(CONNECT_WITHIN_S)
        one.bind((source, 0))
        one.connect((target[0], target[1]))
        one.setblocking(False)
        return {}

    def on_listen(self, made: list[socket.socket], address: list[Any]) -> dict[str, Any]:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((address[0], address[1]))
        one.listen(64)
        one.setblocking(False)
        return {}

    def on_udp(self, made: list[socket.socket], source: list[Any], target: list[Any] | None = None) -> dict[str, Any]:
        """A datagram socket on source (any port if that one is taken), connected to target if there is one."""
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.append(one)
        try:
            one.bind((source[0], source[1]))
        except OSError:
            if target is None:
                raise
            one.bind((source[0], 0))
        if target is not None:
            one.connect((target[0], target[1]))
        one.setblocking(False)
        return {}

    # Ending

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                code = os.waitstatus_to_exitcode(status)
                self._end(code if code >= 0 else 128 - code)

    def _end(self, status: int) -> None:
        """Isolated, this is a namespace's first process: the kernel kills the rest. Else hunt them down here."""
        if not self._isolated:
            for _ in range(100):  # orphans of what was killed come to us, the subreaper: again, until none is left
                if not (found := descendants(os.getpid())):
                    break
                for pid in found:
                    _kill(pid)
                self._collect()
            if self._child:
                _kill(-self._child)
        os._exit(status)

    def _collect(self) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def descendants(root: int) -> list[int]:
    """Every live process below `root`, parents first, where /proc tells."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    state, parent = stat.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(name)] = int(parent)
    below, found = {root}, []
    while more := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(more)
        found += more
    return found


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def main() -> None:
    control, isolated = socket.socket(fileno=int(sys.argv[1])), sys.argv[2] == "isolated"
    if isolated:
        _raise_loopback()
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Gate(control, isolated=isolated).run()


if __name__ == "__main__":
    main()
