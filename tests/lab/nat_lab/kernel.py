"""The few things that the lab asks the kernel for by itself: another network namespace, a TUN device, a clean slate."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NETNS = "/run/netns"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_NETLINK_NETFILTER = 12
_CONNTRACK_DELETE = (1 << 8) | 2  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE; without a tuple: all of them
_NLM_F_REQUEST_ACK = 0x1 | 0x4
_NLMSG_ERROR = 2
COMMAND_BUDGET_S = 20.0


class LabError(Exception):
    """The lab cannot be built, or is no more; says what was tried and what the machine answered."""


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread in another network namespace, for the block. Sockets and children made inside stay there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"{NETNS}/{namespace}", os.O_RDONLY)
    try:
        _setns(there)
        yield
    finally:
        _setns(home)
        os.close(there)
        os.close(home)


def _setns(fd: int) -> None:  # os.setns came with Python 3.12
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


def open_tun(name: str) -> int:
    """A new TUN device in this thread's namespace; its fd reads and writes bare IP packets, and does not block."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


def forget_connections() -> None:
    """Empties this namespace's table of tracked connections, and with it every translation: a router that restarts."""
    family = struct.pack("!BBH", socket.AF_INET, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.settimeout(COMMAND_BUDGET_S)
        netlink.send(struct.pack("=IHHII", 16 + len(family), _CONNTRACK_DELETE, _NLM_F_REQUEST_ACK, 1, 0) + family)
        answer = netlink.recv(4096)
    kind, error = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    if kind != _NLMSG_ERROR or error:
        raise OSError(-error, os.strerror(-error), "forgetting connections")


def command(*args: str, text: str = "") -> None:
    """Runs a command to its end. Raises LabError with what it printed."""
    try:
        done = subprocess.run(args, input=text, capture_output=True, text=True, timeout=COMMAND_BUDGET_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(args)}: {error}") from error
    if done.returncode:
        raise LabError(f"{' '.join(args)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
