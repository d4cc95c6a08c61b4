"""Stages as local processes: the same `node` command, environment and links as on a rented machine, over 127.0.0.1.

Each stage leads its own session, so that a Ctrl-C meant for us does not reach it. Its stdin is its lifeline: when we
end, however we end, it reads EOF and ends too. Its stdout is held by the node and by what the node starts, so EOF there
is the proof that all of it is gone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.gathering import REACH_WITHIN_S
from ppsmoke.errors import DestroyFailed, EnvironmentLacks, SmokeError, StageError, last_words_hint, os_hint
from ppsmoke.package import own_command
from ppsmoke.rent.fleet import Endpoints, SpecOf, StageSpec
from ppsmoke.waiting import Deadline, cancel_and_reap, running
from ppsmoke.worker import cache

LOOPBACK_S = 5.0  # for a connection to ourselves
START_BUDGET_S = 30.0  # from fork to the line that says where a node listens; 0.2 s on an idle machine
LEAVE_BUDGETS_S = (("", 4.0), ("SIGTERM", 2.0), ("SIGKILL", 5.0))  # how long each way of asking to end is given
TAIL_LINES = 60
MAX_LINE_BYTES = 1 << 16
# What a stage may know of this process's environment: where things are, and how tinygrad is to compute.
_PASSED_ON = frozenset(
    "PATH HOME USER LOGNAME LANG LC_ALL LC_CTYPE TMPDIR TZ LD_LIBRARY_PATH VIRTUAL_ENV CC CPATH "
    "XDG_CACHE_HOME XDG_STATE_HOME XDG_CONFIG_HOME PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE PIP_NO_INDEX "
    "PIP_FIND_LINKS PIP_CERT SSL_CERT_FILE SSL_CERT_DIR HTTPS_PROXY https_proxy NO_PROXY no_proxy "
    "DEV CPU CUDA NV AMD METAL CUDA_PTX CUDA_PATH CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CACHELEVEL CACHEDB "
    "OPENBLAS_CORETYPE OPENBLAS_L2_SIZE COVERAGE_PROCESS_START".split()
)


class LoopbackFleet:
    """Local stage processes of one run. on_line(stage, text) is called for each line that a stage writes to stderr."""

    listen_host = "127.0.0.1"
    destroy_budget_s = 90.0  # many times what LEAVE_BUDGETS_S adds up to
    reach_within_s = REACH_WITHIN_S  # an endpoint is known once its node listens

    def __init__(self, *, on_line: Callable[[int, str], None]) -> None:
        self._on_line = on_line
        self._stages: list[_StageProcess] = []
        self._listening = Endpoints()
        self._all_started = asyncio.Event()

    async def rent(self, num_stages: int, spec_of: SpecOf, deadline: Deadline) -> None:
        """Start a process for each stage. Raises EnvironmentLacks where this machine cannot compute a stage."""
        check_this_machine_computes()
        check_loopback()
        for stage in range(num_stages):
            process = _StageProcess(spec_of(stage, 0), self._on_line, self._listening)
            self._stages.append(process)
            await process.start()
        self._all_started.set()

    def endpoints(self) -> AsyncIterator[Endpoint]:
        return self._listening.each()

    async def watch(self) -> NoReturn:
        """Raises StageError for the first stage process that ends."""
        await self._all_started.wait()
        waits = [asyncio.ensure_future(stage.ended()) for stage in self._stages]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_reap(*waits)
        stage, wait = next(pair for pair in zip(self._stages, waits, strict=True) if not pair[1].cancelled())
        wait.result()  # raises where it was not the end of the process
        tail = stage.tail()
        raise StageError(
            f"its process ended ({stage.ending()})" + stage.last_words(),
            stage=stage.spec.stage,
            hint=last_words_hint(tail),
            detail=tail,
        )

    def link_changed(self, node_id: str, *, up: bool) -> None:
        """See Fleet.link_changed. The processes themselves are watched."""

    def failing(self, error: SmokeError) -> None:
        """See Fleet.failing. Ending processes takes no time worth a word."""

    async def logs(self, stage: int | None) -> str:
        return "\n".join(each.tail() for each in self._stages if stage is None or each.spec.stage == stage)

    async def destroy_all(self) -> None:
        """All stages at once: close the lifeline, then SIGTERM, then SIGKILL; done when their output is at EOF."""
        results = await asyncio.gather(*(stage.end() for stage in self._stages))
        cache.sweep()  # of a download that was cut short
        left = [text for text in results if text]
        if left:
            raise DestroyFailed("; ".join(left), phase="destroy", hint="end them with kill -9")


def check_this_machine_computes() -> None:
    """Raises EnvironmentLacks, before anything is started, where Python is too old or tinygrad or numpy is missing."""
    if sys.version_info < (3, 11):
        raise EnvironmentLacks(
            f"a computing stage needs Python 3.11 or newer, this is {sys.version_info[0]}.{sys.version_info[1]}",
            phase="rent",
            hint="run it with python3.11; renting and clustering work from 3.10",
        )
    for module in ("tinygrad", "numpy"):
        if importlib.util.find_spec(module) is None:
            raise EnvironmentLacks(
                f"{module} is not installed for {sys.executable}",
                phase="rent",
                hint="pip install 'ppsmoke[worker]' or pip install tinygrad==0.12.0 numpy",
            )


def check_loopback() -> None:
    """Raises EnvironmentLacks where processes of this machine cannot reach each other (an interface that is down)."""
    try:
        with socket.create_server((LoopbackFleet.listen_host, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        raise EnvironmentLacks(
            f"this machine cannot reach itself at {LoopbackFleet.listen_host}: {error.strerror or error}",
            phase="rent",
            hint=os_hint(error) or "bring its loopback interface up: ip link set lo up",
        ) from error


def stage_environment(spec: StageSpec, parent: Mapping[str, str]) -> dict[str, str]:
    """What a stage process gets to know: a few names of ours that it needs, its spec, and where our code is."""
    environment = {"PATH": os.defpath} | {name: value for name, value in parent.items() if name in _PASSED_ON}
    environment.update(own_command()[1])
    environment.update(spec.environment)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


class _StageProcess:
    """One `node` process, its output, and how it ended."""

    def __init__(self, spec: StageSpec, on_line: Callable[[int, str], None], listening: Endpoints) -> None:
        self.spec = spec
        self._on_line = on_line
        self._listening = listening
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._listens = asyncio.Event()

    async def start(self) -> None:
        certificates = _pipe_holding(self.spec.certificates_json().encode())
        try:
            environment = stage_environment(self.spec, os.environ)
            environment["PPSMOKE_NODE_CERTS"] = f"/dev/fd/{certificates}"
            environment["PPSMOKE_NODE_LIFELINE"] = "stdin"
            self._process = await asyncio.create_subprocess_exec(
                *own_command()[0],
                "node",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env=environment,
                pass_fds=(certificates,),
                start_new_session=True,
            )
        finally:
            os.close(certificates)
        self._readers = [
            asyncio.create_task(self._read_stdout(), name=f"stdout of stage {self.spec.stage}"),
            asyncio.create_task(self._read_stderr(), name=f"stderr of stage {self.spec.stage}"),
        ]

    async def ended(self) -> None:
        """Wait until the process has ended and its last lines are read. Raises DeadlineExceeded if it never listens."""
        async with running(self._process.wait(), name=f"end of stage {self.spec.stage}") as ends:
            listens = asyncio.ensure_future(self._listens.wait())
            try:
                await asyncio.wait({ends, listens}, timeout=START_BUDGET_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_reap(listens)
            if not self._listens.is_set() and not ends.done():
                started = Deadline.after(START_BUDGET_S, phase="rent")
                raise started.expired(
                    "starting the stage's process", hint="-v shows what it printed", stage=self.spec.stage
                )
            await asyncio.wait({ends})
        await asyncio.wait({self._readers[1]}, timeout=0.5)  # its last lines

    def ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "still running"
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def last_words(self) -> str:
        """What the node itself said of its end, if it could."""
        said = next((line for line in reversed(self._tail) if line.startswith("node | ")), "")
        return said.replace("node | ", ": ", 1)[:300]

    def tail(self) -> str:
        return "\n".join(self._tail)

    async def end(self) -> str:
        """End it and all it started; "" when it is seen gone, else what is left."""
        if self._process is None:
            return ""
        with suppress(OSError):
            self._process.stdin.close()
        for name, budget_s in LEAVE_BUDGETS_S:
            if name:
                self._signal_group(getattr(signal, name))
            gone = asyncio.ensure_future(self._process.wait())
            _, waiting = await asyncio.wait({gone, *self._readers}, timeout=budget_s)
            if not waiting:
                return ""
            gone.cancel()
        await cancel_and_reap(*self._readers)
        return f"stage {self.spec.stage}: process group {self._process.pid} still holds its output open"

    def _signal_group(self, signal_number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal_number)

    async def _read_stdout(self) -> None:
        """The first line says where the node listens; anything after it is kept as if it were stderr."""
        line = await self._line(self._process.stdout)
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(line)
            self._listening.put(
                Endpoint(
                    role=self.spec.identity.role,
                    generation=self.spec.generation,
                    node_id=self.spec.identity.node_id,
                    host="127.0.0.1",
                    tcp_port=int(said["tcp_port"]),
                    udp_port=said["udp_port"],
                )
            )
            self._listens.set()
            line = b""
        while line or not self._process.stdout.at_eof():
            self._keep(line)
            line = await self._line(self._process.stdout)

    async def _read_stderr(self) -> None:
        while line := await self._line(self._process.stderr):
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self._tail.append(text)
            self._on_line(self.spec.stage, text)

    @staticmethod
    async def _line(stream: asyncio.StreamReader) -> bytes:
        """The next line, b"" at EOF; an endless one comes in pieces of MAX_LINE_BYTES."""
        try:
            return await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError as error:
            return await stream.readexactly(error.consumed)


def _pipe_holding(data: bytes) -> int:
    """The read end of a pipe with these few bytes in it: handed to a child, they never touch a disk."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, data)  # certificates are about 1.2 kB; a pipe takes 4 KiB at least without a reader
    finally:
        os.close(write_end)
    return read_end
