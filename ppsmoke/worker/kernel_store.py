"""Compiled steps kept between runs: what takes seconds to schedule and render takes 0.1 s to read back.

A stored step is a pickle of a captured TinyJit, machine code included; it holds no weights. So it is read only from a
folder and a file that nobody else can write, and only for the same code, tinygrad, Python, shapes and machine.
Whatever goes wrong here costs time, never the run: the step is compiled anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pickle
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import tinygrad

from ppsmoke.package import source_files

LOCK_WAIT_S = 45.0  # a step takes up to 10 s to compile; 60 s without progress would fail the run
MAX_STEPS = 60  # files kept: three for each shape of stage; a file is 0.4 to 4 MB
CODE = ("llama", "stage_model", "compiled", "kernel_options", "kernel_store", "weights")
# What changes the code that tinygrad makes, beside the device.
ENVIRONMENT = ("BEAM", "NOOPT", "DEVECTORIZE", "THREADS", "CPU_COUNT", "CPU_LLVM", "CC", "CUDA_PTX", "USE_TC", "TC_OPT")


class KernelStore:
    """A folder of compiled steps; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def from_environment(cls) -> KernelStore:
        """Beside the kernel cache that device.prepare() chose; none where that is switched off."""
        database = os.environ.get("CACHEDB", "")
        if not database or os.environ.get("CACHELEVEL") == "0":
            return cls(None)
        return cls(Path(database).parent / "steps")

    @contextlib.contextmanager
    def alone(self, what: dict[str, Any]) -> Iterator[None]:
        """For this block, no other process makes this step: two stages that start together share the work."""
        lock = None
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = open(self._path(what).with_suffix(".lock"), "ab")  # noqa: SIM115
                _take(lock)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    def load(self, what: dict[str, Any]) -> Any:
        """The TinyJit stored under this description, or None."""
        if self._folder is None:
            return None
        path = self._path(what)
        try:
            with open(path, "rb") as file:
                if not (_is_ours_alone(os.fstat(file.fileno())) and _is_ours_alone(os.stat(path.parent))):
                    return None
                data = file.read()
            os.utime(path)
            return pickle.loads(data)
        except OSError:
            return None
        except Exception as error:  # a damaged or foreign pickle can raise anything
            print(f"a stored step cannot be read and is compiled anew: {error!r:.200}", file=sys.stderr)
            return None

    def save(self, what: dict[str, Any], jit: Any) -> None:
        """Store a captured TinyJit that holds no weights and returns no tensor.

        A tensor that it returned would come back under the number that it had here, which in another process is
        another tensor's: seen, with wrong logits.
        """
        if self._folder is None or jit.captured.ret is not None:
            return
        path = self._path(what)
        partial = None
        try:
            data = pickle.dumps(jit)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=self._folder, prefix=".")  # mode 0600
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(partial, path)
            self._prune()
        except Exception as error:  # not every tinygrad can pickle what it captured
            print(f"a compiled step is not kept: {error!r:.200}", file=sys.stderr)
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)

    def forget(self, what: dict[str, Any]) -> None:
        """Remove a stored step that turned out not to run."""
        if self._folder is not None:
            self._path(what).unlink(missing_ok=True)

    def _path(self, what: dict[str, Any]) -> Path:
        assert self._folder is not None
        described = {
            **what,
            "code": _code_hash(),
            "tinygrad": tinygrad.__version__ if hasattr(tinygrad, "__version__") else _distribution_version(),
            "python": sys.version,
            "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        }
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:40]}.pickle"

    def _prune(self) -> None:
        assert self._folder is not None
        files = sorted(self._folder.glob("*.pickle"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[MAX_STEPS:]:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


@functools.cache
def _code_hash() -> str:
    """Of the modules that decide what is compiled."""
    digest = hashlib.sha256()
    for path, data in source_files():
        if path.startswith("ppsmoke/worker/") and Path(path).stem in CODE:
            digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _take(lock: BinaryIO) -> None:
    """Wait for the lock, which the system frees when its holder ends, however it ends; not for a holder that hangs."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)


def _is_ours_alone(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _distribution_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tinygrad")
    except PackageNotFoundError:
        return str(Path(tinygrad.__file__).stat().st_mtime_ns)
