"""The lab's way in: `with NatLab(sites) as lab`. All of it lives in private namespaces and vanishes with its first
process, however this one ends; the machine's own network is neither used nor changed."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

from tests.lab.nat_lab.cable import Conditions
from tests.lab.nat_lab.kernel import LabError
from tests.lab.nat_lab.process import NodeProcess
from tests.lab.nat_lab.spec import Host, Plan, Site
from tests.lab.nat_lab.switch import DIRECTIONS
from tests.lab.nat_lab.wire import MAX_MESSAGE_BYTES, write_site

ROOT = Path(__file__).parents[3]
PRIVATE = ("unshare", "-n", "-m", "-p", "-f", "--kill-child", "--mount-proc")
ANSWER_BUDGET_S = 60.0  # for the slowest request, building many sites on a busy machine
END_BUDGET_S = 10.0
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

Direction = Literal["both", "up", "down"]


class NatLab:
    """Sites on an internet of their own. seed: of every drawn port and every lost packet."""

    def __init__(self, sites: Sequence[Site], *, seed: int = 0) -> None:
        self._plan = Plan(sites)
        self._seed = seed
        self._stack = ExitStack()
        self._processes: list[NodeProcess] = []
        self._one_at_a_time = threading.Lock()
        self._warden: subprocess.Popen[bytes]
        self._control: socket.socket
        self._switch: socket.socket

    def __enter__(self) -> NatLab:
        with ExitStack() as stack:
            self._control, control = self._pair(stack)
            self._switch, switch = self._pair(stack)
            fds = [control.fileno(), switch.fileno()]
            args = [*PRIVATE, sys.executable, "-m", "tests.lab.nat_lab.warden", *map(str, fds)]
            self._warden = subprocess.Popen(args, cwd=ROOT, pass_fds=fds, stdin=DEVNULL, stderr=PIPE)
            stack.callback(self._end)
            for end in (control, switch):
                end.close()
            self._ask_warden(
                op="build", sites=[write_site(site) for site in self._plan.sites.values()], seed=self._seed
            )
            self._ask_switch(op="counts", name=next(iter(self._plan.sites)))  # it carries packets from now on
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @staticmethod
    def _pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_BUDGET_S)
        return stack.enter_context(ours), stack.enter_context(theirs)

    def _end(self) -> None:
        self._control.close()
        try:
            self._warden.wait(END_BUDGET_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()  # --kill-child: the warden goes with it, and everything with the warden
            self._warden.wait()
        self._warden.stderr.close()
        for process in self._processes:
            process.release()

    # --- what there is

    @property
    def hosts(self) -> list[str]:
        return list(self._plan.site_of)

    def node(self, name: str) -> LabNode:
        self._known(name)
        return LabNode(self, name)

    def edge(self, name: str) -> Edge:
        """The cable of the host's site; neighbours share one."""
        return Edge(self, self._known(name))

    def host(self, name: str) -> Host:
        self._known(name)
        return self._plan.host(name)

    def _known(self, name: str) -> str:
        """The host's site."""
        if name not in self._plan.site_of:
            raise ValueError(f"{name!r} is none of {', '.join(self._plan.site_of)}")
        return self._plan.site_of[name]

    # --- what can happen to it

    def cut(self, name: str, other: str = "", *, direction: Direction = "both", after_s: float = 0.0) -> None:
        """From now (or in after_s) nothing passes the host's cable; with `other`, nothing between these two sites."""
        self._sever(name, other, direction, after_s, cut=True)

    def heal(self, name: str, other: str = "", *, direction: Direction = "both", after_s: float = 0.0) -> None:
        """The opposite of cut, with the same arguments."""
        self._sever(name, other, direction, after_s, cut=False)

    def _sever(self, name: str, other: str, direction: Direction, after_s: float, *, cut: bool) -> None:
        if other:
            self._ask_switch(op="part", pair=[self._known(name), self._known(other)], apart=cut, after_s=after_s)
        else:
            self.edge(name).set(direction=direction, after_s=after_s, cut=cut)

    def rebuild(self, name: str, **changes: Any) -> None:
        """Another router for the host's site: any field of Site but hosts. Its connections are forgotten."""
        site = replace(self._plan.sites[self._known(name)], **changes)
        plan = self._plan.with_site(site)
        self._ask_warden(op="rebuild", site=write_site(site))
        self._plan = plan

    def forget_connections(self, name: str) -> None:
        """The router of the host's site restarts: every translation is gone, a random one comes out anew."""
        self._ask_warden(op="forget", site=self._known(name))

    # --- how it is done

    def spawn(self, host: str, args: Sequence[str], **options: Any) -> NodeProcess:
        """See LabNode.popen."""
        with ExitStack() as theirs, ExitStack() as ours:
            fds, pipes = [], []
            for name, mode in (("stdin", "wb"), ("stdout", "rb"), ("stderr", "rb")):
                fd, pipe = _stream(options.pop(name), mode, theirs, ours)
                fds.append(fd)
                pipes.append(pipe)
            end, told = os.pipe()
            ours.callback(os.close, end)
            theirs.callback(os.close, told)
            _, (pidfd,) = self._warden_answer(
                {"op": "spawn", "host": host, "args": list(args), **options}, [*fds, told]
            )
            ours.callback(os.close, pidfd)
            process = NodeProcess(list(args), pidfd, end, tuple(pipes))
            self._processes.append(process)
            ours.pop_all()
        return process

    def _ask_warden(self, **request: Any) -> dict[str, Any]:
        return self._warden_answer(request, [])[0]

    def _warden_answer(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        with self._one_at_a_time:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                message, sent, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
            except OSError as error:
                raise LabError(f"{request['op']}: {error}; {self._last_words()}") from error
        return _checked(message, request, self._last_words), sent

    def _ask_switch(self, **request: Any) -> Any:
        with self._one_at_a_time:
            try:
                self._switch.send(json.dumps(request).encode())
                message = self._switch.recv(MAX_MESSAGE_BYTES)
            except OSError as error:
                raise LabError(f"{request['op']}: the lab's internet does not answer: {error}") from error
        return _checked(message, request, self._last_words)

    def _last_words(self) -> str:
        try:
            self._warden.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its first process still runs"
        return self._warden.stderr.read().decode(errors="replace").strip()[-2000:] or "its first process has ended"


def _checked(message: bytes, request: dict[str, Any], last_words: Any) -> Any:
    if not message:
        raise LabError(f"{request['op']}: the lab has ended: {last_words()}")
    answer = json.loads(message)
    if isinstance(answer, dict) and "error" in answer:
        raise LabError(answer["error"])
    return answer


def _stream(wanted: int | None, mode: str, theirs: ExitStack, ours: ExitStack) -> tuple[int, IO[bytes] | None]:
    """The fd to hand to a child for a stream, and our end of it: PIPE, DEVNULL, an fd, or None for our own."""
    reading = mode == "rb"
    if wanted == PIPE:
        read_end, write_end = os.pipe()
        child_end, own_end = (write_end, read_end) if reading else (read_end, write_end)
        theirs.callback(os.close, child_end)
        pipe = os.fdopen(own_end, mode, 0)
        ours.callback(pipe.close)
        return child_end, pipe
    if wanted == DEVNULL:
        fd = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, fd)
        return fd, None
    if wanted is None:
        return (2 if reading else 0), None  # stdout is whoever's who uses the lab: what a node prints is for its stderr
    return wanted, None


class LabNode:
    """A host of the lab: where it is, and processes in it."""

    def __init__(self, lab: NatLab, name: str) -> None:
        self._lab, self.name = lab, name

    @property
    def where(self) -> Host:
        return self._lab.host(self.name)

    def popen(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
        stdin: int | None = DEVNULL,
        stdout: int | None = PIPE,
        stderr: int | None = None,
    ) -> NodeProcess:
        """Start a process here, at the head of its own session. Streams: PIPE, DEVNULL, an fd, None for stderr."""
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        return self._lab.spawn(self.name, args, env=dict(os.environ if env is None else env), cwd=str(cwd), **streams)


class Edge:
    """The cable between a site's router and the internet."""

    def __init__(self, lab: NatLab, site: str) -> None:
        self._lab, self._site = lab, site

    def set(self, *, direction: Direction = "both", after_s: float = 0.0, **conditions: float) -> None:
        """Change some of its Conditions, the others stay; they hold once this returns, or after after_s."""
        Conditions(**conditions)  # raises for what cannot be
        directions = DIRECTIONS if direction == "both" else (direction,)
        self._lab._ask_switch(op="set", name=self._site, directions=directions, conditions=conditions, after_s=after_s)

    def conditions(self, direction: Literal["up", "down"]) -> Conditions:
        return Conditions(**self._lab._ask_switch(op="conditions", name=self._site, direction=direction))

    def counts(self) -> dict[str, dict[str, int]]:
        """By direction, what has become of its packets: passed, lost, doubled, held_back, overflowed; and bytes."""
        return self._lab._ask_switch(op="counts", name=self._site)


@functools.cache
def why_not() -> str:
    """Why the lab cannot run here, in a line; "" if it can: then a small one has just been built and taken down."""
    if not sys.platform.startswith("linux"):
        return "the NAT lab needs Linux"
    if os.geteuid() != 0:
        return "the NAT lab needs root: it makes network namespaces"
    for tool, package in (("nft", "nftables"), ("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"the NAT lab needs {tool}: apt-get install {package}"
    if not os.path.exists("/dev/net/tun"):
        return "the NAT lab needs /dev/net/tun"
    try:
        with NatLab([Site(hosts=("probe",), nat="nat-preserving")]):
            return ""
    except (LabError, OSError) as error:
        return f"the NAT lab cannot be built here: {error}"
