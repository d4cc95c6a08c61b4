"""Workers that stay warm while the nodes around them come and go: what a node starts as its worker is a go-between.

`WarmWorkers` starts a real worker for each stage, once. A node whose environment is `environment(stage)` starts, in
its place, `serve`, which leads to that worker over a socket in the file system: network namespaces do not part it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from ppsmoke.worker.start import write_all

ROOT = Path(__file__).parents[3]
TARGET = "tests.lab.nat_lab.warm_workers:serve"
WHERE = "LAB_WARM_WORKER"
END_S = 10.0


class WarmWorkers:
    """For its block. Each of them serves any number of nodes, one request after the other."""

    def __init__(self, model: Path, *, num_stages: int, wire_dtype: str = "float32", device: str = "CPU") -> None:
        self._model, self._num_stages = model, num_stages
        self._settings = {"PPSMOKE_NODE_WIRE_DTYPE": wire_dtype, "PPSMOKE_NODE_DEVICE": device}
        self._stack = ExitStack()
        self._folder = Path()

    def __enter__(self) -> WarmWorkers:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppsmoke-warm-")))
            workers = [self._start(stack, stage) for stage in range(self._num_stages)]
            for stage, worker in enumerate(workers):
                _Warm(worker, str(self._where(stage)), stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def environment(self, stage: int) -> dict[str, str]:
        return {"PPSMOKE_NODE_WORKER": TARGET, WHERE: str(self._where(stage))}

    def _where(self, stage: int) -> Path:
        return self._folder / f"stage-{stage}"

    def _start(self, stack: ExitStack, stage: int) -> subprocess.Popen[bytes]:
        task = {"STAGE": str(stage), "NUM_STAGES": str(self._num_stages), "MODEL": str(self._model)}
        worker = subprocess.Popen(
            [sys.executable, "-m", "ppsmoke.worker"],
            cwd=ROOT,
            env=os.environ | task | self._settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(_end, worker)
        return worker


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.stdin.close()
    try:
        worker.wait(END_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    worker.stdout.close()


class _Warm:
    """One worker, and who comes to it. It is a caller's from its first request until its reset, or until it goes."""

    def __init__(self, worker: subprocess.Popen[bytes], where: str, stack: ExitStack) -> None:
        self._worker = worker
        self._in_use = threading.Lock()
        self._ready = self._first_words()
        self._listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(where)
        self._listening.listen(16)
        stack.callback(self._listening.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=self._accept, name=f"warm worker {where}", daemon=True).start()

    def _first_words(self) -> bytes:
        for line in self._worker.stdout:
            match json.loads(line).get("status"):
                case "ready":
                    return line
                case "failed":
                    raise RuntimeError(f"the worker cannot load: {line!r}")
        raise RuntimeError("the worker ended before it was ready")

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:
                return  # shut down
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        mine = False
        with caller, caller.makefile("rb") as requests, suppress(OSError, ValueError):
            try:
                caller.sendall(self._ready)
                for line in requests:
                    if not mine:
                        mine = self._in_use.acquire()
                    caller.sendall(self._ask(line))
                    if json.loads(line).get("op") == "reset":
                        self._in_use.release()
                        mine = False
            finally:
                if mine:
                    self._ask(b'{"op": "reset", "request_id": 0}\n')
                    self._in_use.release()

    def _ask(self, line: bytes) -> bytes:
        self._worker.stdin.write(line)
        self._worker.stdin.flush()
        return self._worker.stdout.readline()


def serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """The worker's main, as a node starts it: carries lines to the warm one and back until its input ends."""
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(os.environ[WHERE])

        def carry_requests() -> None:
            for line in requests:
                warm.sendall(line)
            warm.shutdown(socket.SHUT_WR)

        threading.Thread(target=carry_requests, daemon=True).start()
        with warm.makefile("rb") as answers:
            for line in answers:
                write_all(replies, line)
    return 0
