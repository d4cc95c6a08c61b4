"""The worker process: load a stage as the environment says, say ready, then one JSON line in, one out.

Started by start.py, as a child of the stage node or as `python -m ppsmoke.worker`. Whatever is imported at the top
here is light: tinygrad reads its environment at import, so device.prepare() comes before it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from ppsmoke.errors import EnvironmentLacks, FetchError, GgufError, InputError, SmokeError, os_hint
from ppsmoke.worker import device, start

if TYPE_CHECKING:
    from ppsmoke.worker.operations import Operations
    from ppsmoke.worker.stage_model import StageModel

DEFAULT_MAX_CONTEXT = 2048
DEFAULT_WIRE_DTYPE = "bfloat16"  # the specification's wire format
MAX_LINE_BYTES = 32 << 20  # twice what a stage node's reader takes; base64 of a chunk is far below
_IMPORTED_AT = time.perf_counter()
_FAILURE_KINDS = ((GgufError, "model"), (InputError, "input"), (FetchError, "fetch"), (EnvironmentLacks, "environment"))


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What the environment of a worker says."""

    stage: int
    num_stages: int
    model: str
    max_context: int
    wire_dtype: str
    device: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerSettings:
        """Raises InputError naming the variable."""
        num_stages = _number(environment, "NUM_STAGES", None, low=1)
        model = environment.get("MODEL", "")
        if not model:
            raise InputError("MODEL is not set", hint="a model's name, the path of a GGUF file, or its URL")
        wire_dtype = environment.get("PPSMOKE_NODE_WIRE_DTYPE") or DEFAULT_WIRE_DTYPE
        if wire_dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f"PPSMOKE_NODE_WIRE_DTYPE is {wire_dtype!r:.40}, not bfloat16, float16 or float32")
        return cls(
            stage=_number(environment, "STAGE", None, low=0, high=num_stages - 1),
            num_stages=num_stages,
            model=model,
            max_context=_number(environment, "PPSMOKE_NODE_MAX_CONTEXT", DEFAULT_MAX_CONTEXT, low=1),
            wire_dtype=wire_dtype,
            device=environment.get("PPSMOKE_NODE_DEVICE", ""),
        )


def serve(requests: BinaryIO, replies: BinaryIO, environment: MutableMapping[str, str] | None = None) -> int:
    """Load, announce and answer until the requests end; the exit status: 0, or 1 if the stage could not be loaded."""
    try:
        operations = _load(replies, os.environ if environment is None else environment)
    except BrokenPipeError:
        return 0
    except (
        Exception
    ) as error:  # whatever a damaged file makes tinygrad raise: the person who started the run must see it
        if not isinstance(error, SmokeError):
            traceback.print_exc(file=sys.stderr)
        _send(replies, {"status": "failed", "error": _failure(error)})
        return 1
    while (line := requests.readline(MAX_LINE_BYTES)) != b"":
        try:
            _send(replies, _answer(operations, line, requests))
        except BrokenPipeError:
            break
    return 0


def _load(replies: BinaryIO, environment: MutableMapping[str, str]) -> Operations:
    settings = WorkerSettings.from_environment(environment)
    chosen = device.prepare(settings.device, environment)

    def progress(what: str, done: int, total: int) -> None:
        _send(replies, {"status": "loading", "what": what, "done": done, "total": total})

    progress("starting", 0, 0)
    # Only now: these import numpy and tinygrad.
    from ppsmoke.worker.fetch import open_model
    from ppsmoke.worker.gguf import Gguf
    from ppsmoke.worker.operations import Operations
    from ppsmoke.worker.stage_model import StageModel
    from ppsmoke.worker.tokenizer import Tokenizer

    source = open_model(settings.model, progress=progress)
    gguf = Gguf.read(source)
    tokenizer = Tokenizer.from_gguf(gguf.metadata)
    model = StageModel.load(
        source,
        gguf,
        stage=settings.stage,
        num_stages=settings.num_stages,
        max_context=settings.max_context,
        device=chosen,
        progress=progress,
    )
    loaded_s = _process_age_s()
    model.warm_up(progress=progress)
    ready = {
        "status": "ready",
        "pid": os.getpid(),
        "stage": settings.stage,
        "load_s": round(loaded_s, 3),
        "warmup_s": round(_process_age_s() - loaded_s, 3),
        "bytes_read": getattr(source, "bytes_read", 0),
        "model": {
            "name": settings.model,
            "sha256": getattr(source, "sha256", None),
            "blocks": model.config.blocks,
            "context": model.config.context,
        },
        "fingerprint": gguf.fingerprint,
        "eog": sorted(tokenizer.eog),
    }
    _send(replies, ready | _described(model))
    return Operations(model, tokenizer, wire_dtype=settings.wire_dtype)


def _described(model: StageModel) -> dict[str, Any]:
    """The stage's own part of the ready line."""
    return {
        "device": model.device,
        "chunk": model.chunk,
        "context": model.context,
        "blocks": list(model.blocks_range),
        "total_blocks": model.config.blocks,
        "hidden_dim": model.config.dim,
        "weight_bytes": model.weight_bytes,
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def _answer(operations: Operations, line: bytes, requests: BinaryIO) -> dict[str, Any]:
    """The reply to one line, whatever it holds."""
    from ppsmoke.worker.operations import RequestError

    request_id = None
    try:
        if len(line) >= MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := requests.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            raise RequestError("bad_json", f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError("bad_json", f"this line is no JSON: {error}") from error
        if isinstance(request, dict) and isinstance(request.get("request_id"), (int, str)):
            request_id = request["request_id"]
        return {"request_id": request_id, **operations.handle(request)}
    except RequestError as error:
        return {"request_id": request_id, "error": {"kind": error.kind, "message": str(error)}}
    except Exception as error:  # ours, or the device's: the request fails, the worker lives on
        traceback.print_exc(file=sys.stderr)
        message = f"{type(error).__name__}: {error}"
        return {"request_id": request_id, "error": {"kind": "internal", "message": message[:400]}}


def _failure(error: Exception) -> dict[str, str]:
    kind = next((kind for tree, kind in _FAILURE_KINDS if isinstance(error, tree)), "internal")
    if isinstance(error, SmokeError):
        return {"kind": kind, "message": error.cause, "hint": error.hint}
    return {"kind": kind, "message": f"{type(error).__name__}: {error}"[:400], "hint": os_hint(error)}


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    start.write_all(replies, json.dumps(message).encode() + b"\n")


def _number(environment: Mapping[str, str], name: str, default: int | None, *, low: int, high: int = 1 << 30) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdecimal() or not low <= int(text[:20]) <= high:
        raise InputError(f"{name} is {text[:20]!r}, not a number from {low} to {high}")
    return int(text)


def _process_age_s() -> float:
    """Seconds since this process began; where /proc does not tell, since this module was imported."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])  # starttime, proc(5), since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED_AT


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(serve(*start.take_stdio()))
