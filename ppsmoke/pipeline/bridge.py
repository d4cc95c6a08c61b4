"""The node's side of its worker process: JSON lines there and back, and the certainty of hearing of its death.

The worker is a multiprocessing (spawn) child, so it starts from a zipapp as well as from a checkout. Nothing here
knows what the operations mean. Recipes and their traps: spawn, signals and pipes in worker/start.py.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from ppsmoke.errors import StageError, WorkerLost, WorkerRefused
from ppsmoke.pipeline.lines import LineReader, StderrTail
from ppsmoke.worker import start

MAX_LINE_BYTES = 16 << 20  # a chunk's hidden states, 8 MiB at most (operations.py), are 11 MiB as base64
CLOSE_GRACE_S = 2.0  # an idle worker leaves 25 ms after the end of its input
TAIL_WAIT_S = 0.5  # stderr ends with the worker's last grandchild, and we have just killed those
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # a million emoji stay 4 MB


class Bridge:
    """One worker process, from its start to its certain end. Calls are answered in the order in which they were made.

    ready: the worker's ready line; raises StageError with a failed line's message and hint, or WorkerLost.
    lost: resolves, never raises, with the WorkerLost that says how the process ended (`detail`: its stderr's tail).
    """

    def __init__(self, process: Any, *, stage: int, on_progress: Callable[[dict], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.lost: asyncio.Future[WorkerLost] = loop.create_future()
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # marks it as seen
        self.pid: int = process.pid
        self._process = process
        self._stage = stage
        self._on_progress = on_progress
        self._calls: deque[tuple[Any, asyncio.Future[dict]]] = deque()
        self._cause = ""  # why we ended it ourselves, when we did
        self._died = asyncio.Event()
        self._tail = StderrTail()
        self._replies = LineReader(self._on_line, limit=MAX_LINE_BYTES, on_overflow=self._on_overflow)
        self._errors = LineReader(self._tail.add, limit=self._tail.MAX_LINE_BYTES, on_overflow=self._tail.add)
        self._pipes: list[asyncio.BaseTransport] = []
        self._requests: asyncio.WriteTransport
        self._burial: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        environment: Mapping[str, str],
        *,
        stage: int,
        on_progress: Callable[[dict], None],
        target: str = start.DEFAULT_TARGET,
    ) -> Bridge:
        """Start the worker with exactly this environment; `target` is what it serves. Call it from the main thread.

        on_progress gets each loading line as it comes. Returns before the worker is ready: await `ready`.
        """
        loop = asyncio.get_running_loop()
        process, (requests, replies, errors) = _spawn(target, dict(environment), name=f"worker of stage {stage}")
        bridge = cls(process, stage=stage, on_progress=on_progress)
        loop.add_reader(process.sentinel, bridge._on_death)
        bridge._burial = asyncio.ensure_future(bridge._bury())
        try:
            for protocol, end in ((bridge._replies, replies), (bridge._errors, errors)):
                transport, _ = await loop.connect_read_pipe(lambda protocol=protocol: protocol, _open(end, "rb"))
                bridge._pipes.append(transport)
            bridge._requests, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, _open(requests, "wb"))
            bridge._pipes.append(bridge._requests)
        except BaseException:
            bridge._kill("the node gave up while it started it")
            await bridge._burial
            raise
        return bridge

    def stderr_tail(self) -> str:
        """The last lines of the worker's stderr, bounded."""
        return self._tail.text()

    async def call(self, op: str, *, deadline_s: float, **fields: Any) -> dict[str, Any]:
        """The worker's reply. Raises WorkerRefused when it answers with an error (it lives on), WorkerLost when it is
        gone or has not answered within deadline_s (it is killed: nobody knows what it is still computing)."""
        if self._died.is_set() or self._cause:
            raise await asyncio.shield(self.lost)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict] = loop.create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._calls.append((fields.get("request_id"), answer))
        overdue = loop.call_later(deadline_s, self._kill, f"{op} was not answered within {deadline_s:g} s")
        try:
            self._requests.write(_to_json({"op": op, **fields}).encode() + b"\n")
            reply = await answer
        finally:
            overdue.cancel()
        if (error := reply.get("error")) is not None:
            raise self._refusal(op, error)
        return reply

    async def close(self) -> None:
        """End the worker and all it started: end of input, a grace, then SIGKILL to its group. May be called again.
        One that loads or computes does not look at its input, and nobody waits for the result: it gets no grace."""
        if not self._died.is_set():
            is_idle = self.ready.done() and not self._calls
            self._cause = self._cause or "ended by its node"
            self._requests.close()
            if is_idle:
                await asyncio.wait({self._burial}, timeout=CLOSE_GRACE_S)
            self._kill(self._cause)
        await asyncio.shield(self._burial)

    def _on_line(self, line: bytes) -> None:
        if self._cause:  # it is being ended: whatever else it says is not to be trusted
            return
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self._kill(f"wrote something that is no reply: {bytes(line[:80])!r}")
        elif "status" in reply:
            self._on_status(reply)
        elif not self._calls:
            self._kill(f"answered what nobody asked: {bytes(line[:80])!r}")
        else:
            self._on_reply(reply)

    def _on_status(self, reply: dict[str, Any]) -> None:
        if reply["status"] == "ready" and not self.ready.done():
            self.ready.set_result(reply)
        elif reply["status"] == "failed" and not self.ready.done():
            error = reply.get("error")
            error = error if isinstance(error, dict) else {}
            cause = str(error.get("message") or "the worker could not load, and did not say why")
            hint, detail = str(error.get("hint") or ""), self.stderr_tail()
            self.ready.set_exception(StageError(cause, phase="load", stage=self._stage, hint=hint, detail=detail))
        elif reply["status"] == "loading":
            self._on_progress(reply)

    def _on_reply(self, reply: dict[str, Any]) -> None:
        request_id, answer = self._calls.popleft()
        if reply.get("request_id") != request_id:
            self._kill(f"answered request {reply.get('request_id')!r} when it was asked for {request_id!r}")
            reply = {"error": {"kind": "protocol", "message": "the answer of another request"}}
        if not answer.done():
            answer.set_result(reply)

    def _refusal(self, op: str, error: Any) -> WorkerRefused:
        error = error if isinstance(error, dict) else {"message": error}
        message = str(error.get("message") or "an error without a message")
        return WorkerRefused(f"{op}: {message}", kind=str(error.get("kind") or ""), phase="ask", stage=self._stage)

    def _on_overflow(self, beginning: bytes) -> None:
        self._kill(f"wrote a line of more than {MAX_LINE_BYTES >> 20} MiB: {bytes(beginning[:80])!r}")

    def _kill(self, cause: str) -> None:
        """SIGKILL to the worker's session; what it was started for fails with this cause once it is seen dead."""
        if self._died.is_set():
            return
        self._cause = self._cause or cause
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it leads no session yet: its first 100 ms
            self._process.kill()

    def _on_death(self) -> None:
        """The process has ended. Its group goes before it is reaped: until then its id belongs to nobody else."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            pass
        self._died.set()

    async def _bury(self) -> None:
        await self._died.wait()
        ends = [asyncio.ensure_future(reader.ended.wait()) for reader in (self._replies, self._errors)]
        await asyncio.wait(ends, timeout=TAIL_WAIT_S)  # a last line (failed, a traceback) may still be on its way
        for end in ends:
            end.cancel()
        self._tail.flush()
        await asyncio.to_thread(self._process.join)  # it has ended, so this reaps at once
        error = self._obituary(self._process.exitcode)
        self._process.close()
        for pipe in self._pipes:
            pipe.close()
        if not self.ready.done():
            self.ready.set_exception(error)
        while self._calls:
            _, answer = self._calls.popleft()
            if not answer.done():
                answer.set_exception(error)
        self.lost.set_result(error)

    def _obituary(self, code: int) -> WorkerLost:
        if code < 0:
            cause = f"the worker was killed by signal {-code} ({_signal_name(-code)})"
        else:
            cause = f"the worker exited with status {code}"
        cause = self._cause or cause
        hint = ""
        if code == -signal.SIGKILL and not self._cause:
            hint = "the system may have run out of memory: try a smaller model or --max-context"
        phase = "ask" if self.ready.done() and not self.ready.exception() else "load"
        return WorkerLost(cause, phase=phase, stage=self._stage, hint=hint, detail=self.stderr_tail())


def _spawn(target: str, environment: dict[str, str], *, name: str) -> tuple[Any, tuple[Connection, ...]]:
    """The started process and our ends of its pipes: requests, replies, stderr."""
    context = multiprocessing.get_context("spawn")
    their_requests, requests = context.Pipe(duplex=False)
    replies, their_replies = context.Pipe(duplex=False)
    errors, their_errors = context.Pipe(duplex=False)
    theirs, ours = (their_requests, their_replies, their_errors), (requests, replies, errors)
    process = context.Process(target=start.entry, args=(*theirs, target, environment), name=name, daemon=True)
    # In this order, tried on 3.10 to 3.13: a Ctrl-C in the child's first 100 ms would kill it before entry can ignore
    # it, and the start of the resource tracker unblocks SIGINT in this process.
    resource_tracker.ensure_running()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    except BaseException:
        for end in ours:
            end.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        for end in theirs:  # else the end of the pipes would never be seen
            end.close()
    return process, ours


def _open(end: Connection, mode: str) -> Any:
    fd = os.dup(end.fileno())
    end.close()
    os.set_blocking(fd, False)
    return os.fdopen(fd, mode, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
