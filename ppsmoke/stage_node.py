"""`python -m ppsmoke node`: a cluster node, a stage actor and a worker process, for as long as the run needs them.

Its first line on stdout says where it listens. It ends by itself: with its orchestrator, with its lifeline, with its
lifetime, with its worker; and takes the worker along on every way out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ppsmoke import models
from ppsmoke.cluster.addresses import Address, Endpoint
from ppsmoke.cluster.events import Event, LinkDown, LinkUp, MemberChanged
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, EnvironmentLacks, InputError, SmokeError
from ppsmoke.node_settings import NodeSettings, Seed
from ppsmoke.package import code_hash
from ppsmoke.pipeline.bridge import Bridge
from ppsmoke.pipeline.failures import failure
from ppsmoke.pipeline.messages import encode
from ppsmoke.pipeline.names import ORCHESTRATOR_MAILBOX, ORCHESTRATOR_ROLE, STAGE_MAILBOX, may_own, names_of
from ppsmoke.pipeline.stage import StageActor
from ppsmoke.standard_streams import keep_standard_streams_open
from ppsmoke.waiting import Deadline, cancel_and_reap, running, to_the_end
from ppsmoke.worker.start import DEFAULT_TARGET

ORCHESTRATOR_GONE_S = 90.0  # six times what a run bears without a link: by then it has failed and waits for nobody
SEED_DIAL_S = 5.0  # for each of SEED_ADDR's addresses, in turn
HEARTBEAT_S = 2.0  # a sixtieth of the silence after which a machine ends itself
REPORT_BUDGET_S = 20.0  # for the orchestrator to dial us, should we fail before it has
LINGER_S = 30.0  # a stage that leaves before all have gathered would hide its own report behind "gathering failed"
WORKER_END_BUDGET_S = 10.0
OLDEST_PYTHON = (3, 11)  # tinygrad's own demand


@dataclass(frozen=True)
class Ending:
    """Why the node ends, in one line, and its exit status: 0 when it was told to, 1 when something failed."""

    why: str
    exit_status: int

    @classmethod
    def of(cls, error: Exception) -> Ending:
        hint = error.hint if isinstance(error, SmokeError) else ""
        return cls(f"{error} ({hint})" if hint else str(error), 1)


def main(environment: MutableMapping[str, str] = os.environ) -> int:
    """The node's whole life; its exit status. What went wrong is one line on stderr, and a StageFailed if it can."""
    keep_standard_streams_open()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="node | %(message)s")
    try:
        settings = NodeSettings.from_environment(environment)
        ending = asyncio.run(_live(settings))
    except SmokeError as error:
        ending = Ending.of(error)
    if ending.exit_status:
        with suppress(OSError):
            print(f"node | {ending.why}", file=sys.stderr, flush=True)
    return ending.exit_status


async def _live(settings: NodeSettings) -> Ending:
    with _ended_by_signals() as ended:
        asyncio.get_running_loop().call_later(
            settings.lifetime_s, _end, ended, Ending(f"its lifetime of {settings.lifetime_s:g} s has passed", 1)
        )
        async with (
            _lifeline(ended, wanted=settings.lifeline),
            _joined(settings) as node,
            running(_watch_orchestrator(node, settings, ended), name="watch over the orchestrator"),
            running(_beat(node, settings), name="heartbeat"),
        ):
            failures: list[Exception] = []
            work = asyncio.ensure_future(_work(node, settings, failures))
            try:
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()  # raises what is a mistake of ours
                    await asyncio.wait({ended}, timeout=_linger_s(failures[0]))
            finally:
                await cancel_and_reap(work)
            # Whoever is told of a failure may end us before we have said it to the end: it was a failure all the same.
            return Ending.of(failures[0]) if failures else ended.result()


@asynccontextmanager
async def _joined(settings: NodeSettings) -> AsyncIterator[Node]:
    """The node, listening, its names registered: before its worker has even started."""
    num_stages = settings.num_stages
    async with Node.listening(
        settings.identity,
        cluster_key=settings.cluster_key,
        tcp=settings.tcp,
        udp=settings.udp,
        advertise=settings.advertise,
        code_hash=code_hash(),
        model=models.fingerprint(settings.model),
        may_own=lambda name, role: may_own(name, role, num_stages),
    ) as node:
        where = {"node_id": node.node_id, "tcp_port": node.tcp_port, "udp_port": node.udp_port, "pid": os.getpid()}
        try:
            print(json.dumps({"status": "listening", **where}), flush=True)
        except OSError as error:
            raise InputError(f"nobody reads our stdout: {error.strerror}") from error
        for name in names_of(settings.stage, num_stages):
            node.register(name, STAGE_MAILBOX, generation=settings.generation)
        yield node


async def _work(node: Node, settings: NodeSettings, failures: list[Exception]) -> None:
    """Serve requests until cancelled, or until the worker is lost or never came: then `failures` says so first."""
    orchestrator = Address(settings.seed.node_id, ORCHESTRATOR_MAILBOX)
    actor: StageActor | None = None

    def on_progress(line: dict[str, Any]) -> None:
        if actor is not None:
            actor.on_progress(line)

    try:
        _check_can_compute(settings)
        bridge = await Bridge.start(
            settings.worker_environment, stage=settings.stage, on_progress=on_progress, target=settings.worker
        )
    except (SmokeError, OSError) as error:
        failures.append(error)
        await _report(node, orchestrator, settings.stage, error)
        return
    try:
        actor = StageActor(
            stage=settings.stage,
            num_stages=settings.num_stages,
            worker=bridge,
            post=node,
            mailbox=node.mailbox(STAGE_MAILBOX),
            orchestrator=orchestrator,
            on_failed=failures.append,
            links=node.links,
        )
        with suppress(SmokeError):
            await actor.run()
    finally:
        await to_the_end(bridge.close(), doing="ending the worker", within_s=WORKER_END_BUDGET_S)


def _linger_s(failure: Exception) -> float:
    return LINGER_S if isinstance(failure, SmokeError) and failure.phase == "load" else 0.0


def _check_can_compute(settings: NodeSettings) -> None:
    """Raises EnvironmentLacks where our own worker could not even be imported; it checks the rest itself."""
    if settings.worker != DEFAULT_TARGET:
        return
    lacks = {"phase": "load", "stage": settings.stage}
    if sys.version_info < OLDEST_PYTHON:
        found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST_PYTHON))
        hint = f"run ppsmoke with Python {needed} or newer"
        raise EnvironmentLacks(f"a computing stage needs Python {needed}, this is {found}", hint=hint, **lacks)
    for package in ("numpy", "tinygrad"):
        if importlib.util.find_spec(package) is None:
            hint = f"{sys.executable} -m pip install tinygrad==0.12.0 numpy"
            raise EnvironmentLacks(f"a computing stage needs {package}, which is not installed", hint=hint, **lacks)


async def _report(node: Node, orchestrator: Address, stage: int, error: Exception) -> None:
    """StageFailed for what failed before there was an actor; it may have to wait for the orchestrator to dial us."""
    with suppress(SmokeError):
        message = encode(failure(0, error, stage=stage, phase="load"))
        await Deadline.after(REPORT_BUDGET_S).wait(node.send(orchestrator, message), doing="telling the orchestrator")


async def _watch_orchestrator(node: Node, settings: NodeSettings, ended: asyncio.Future[Ending]) -> None:
    """Dial it where we know how, and end with it: at once when it says so, late when it is only out of reach."""
    events = node.subscribe()
    async with running(_dial_all(node, settings), name="dial the orchestrator"):
        gone_since: asyncio.TimerHandle | None = None
        while True:
            event: Event = await events.get()
            if event.peer != settings.seed.node_id:
                continue
            match event:
                case LinkUp(restarted=True):
                    _end(ended, Ending("the orchestrator has been started anew", 1))
                case LinkUp() if gone_since is not None:
                    gone_since.cancel()
                case LinkDown():
                    ending = Ending(f"the orchestrator has been out of reach for {ORCHESTRATOR_GONE_S:g} s", 1)
                    gone_since = asyncio.get_running_loop().call_later(ORCHESTRATOR_GONE_S, _end, ended, ending)
                case MemberChanged(state="left"):
                    _end(ended, Ending("the orchestrator has left", 0))


async def _beat(node: Node, settings: NodeSettings) -> None:
    """Touch the heartbeat file, which this machine's dead-man looks at, while there is a link to the orchestrator: one
    on which nothing is heard any more is taken down within seconds (cluster/link.py)."""
    while settings.heartbeat:
        if any(link.role == ORCHESTRATOR_ROLE for link in node.links()):
            with suppress(OSError):
                os.utime(settings.heartbeat)
        await asyncio.sleep(HEARTBEAT_S)
    await asyncio.Event().wait()


async def _dial_all(node: Node, settings: NodeSettings) -> None:
    others = [_dial_seed(node, peer, role="") for peer in settings.peers]
    await asyncio.gather(_dial_seed(node, settings.seed, role=ORCHESTRATOR_ROLE), *others)


async def _dial_seed(node: Node, seed: Seed, *, role: str) -> None:
    """One address after the other until there is a link; then the node keeps it up. Without one it dials us."""
    for host, port in itertools.cycle(seed.addresses):
        endpoint = Endpoint(role, 0, seed.node_id, host, port, None)
        with suppress(DeadlineExceeded):
            await Deadline.after(SEED_DIAL_S).wait(node.dial(endpoint), doing="dialling the orchestrator")
            return


def _end(ended: asyncio.Future[Ending], ending: Ending) -> None:
    if not ended.done():
        ended.set_result(ending)


@contextmanager
def _ended_by_signals() -> Iterator[asyncio.Future[Ending]]:
    """What the node's end is told to; SIGTERM, SIGINT and SIGHUP tell it. No signal raises through the loop."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Ending] = loop.create_future()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, _end, ended, Ending(f"ended by {number.name}", 0))
    try:
        yield ended
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _lifeline(ended: asyncio.Future[Ending], *, wanted: bool) -> AsyncIterator[None]:
    """End when stdin does. Raises InputError where stdin could not tell: a file, a terminal or /dev/null."""
    if not wanted:
        yield
        return
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise InputError("PPSMOKE_NODE_LIFELINE asks for stdin, which is no pipe")
    pipe = os.fdopen(os.dup(0), "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _Lifeline(ended), pipe)
    try:
        yield
    finally:
        transport.close()


class _Lifeline(asyncio.Protocol):
    def __init__(self, ended: asyncio.Future[Ending]) -> None:
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        _end(self._ended, Ending("its lifeline has ended", 0))
