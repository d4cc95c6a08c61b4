"""A worker that speaks the protocol and does not compute: what it answers depends on every position it was given.

Each "block" keeps a digest of all it has seen, as a KV cache would, and hidden states carry digests from block to
block. So one lost, doubled or reordered chunk anywhere changes every token after it, and `continuation` says what
the tokens have to be, for any number of stages. Start it with target="tests.lab.still_worker:serve".

Environment: STILL_CHUNK, STILL_CONTEXT, STILL_DIM (sizes), STILL_EOG_AT (the n-th token is the end of generation),
STILL_SLOW_S (each op takes that long), STILL_PIDS (a file: pids of this worker and of the child that "child" starts),
STILL_FAULT: comma-separated `what@n`, before the n-th op is answered, or `what@load`; see `_misbehave`.
STILL_GATE: the file that `gate@n` waits for to be removed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from ppsmoke.worker.start import write_all

TARGET = "tests.lab.still_worker:serve"
BLOCKS = 7
BOS, EOG, FIRST_BYTE = 1, 2, 3  # ids 3 to 258 are the bytes
DIGEST_BYTES = 8
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Refused(Exception):
    """An op that is answered with an error; args are kind and message."""


def encode(prompt: str, *, raw: bool) -> list[int]:
    """The ids of a prompt: its bytes, with one id before them where a chat template would stand."""
    return ([] if raw else [BOS]) + [FIRST_BYTE + byte for byte in prompt.encode()]


def decode(tokens: list[int]) -> str:
    return bytes(token - FIRST_BYTE for token in tokens if token >= FIRST_BYTE).decode("latin-1")


def continuation(prompt_ids: list[int], count: int) -> list[int]:
    """The first count tokens that any split of this "model" has to answer with (no end of generation)."""
    states, tokens = [b""] * BLOCKS, []
    for _ in range(count):
        for token in prompt_ids if not tokens else tokens[-1:]:
            row = _blocks(token.to_bytes(DIGEST_BYTES, "little"), states, range(BLOCKS))
        tokens.append(_token(row))
    return tokens


def _blocks(row: bytes, states: list[bytes], blocks: range) -> bytes:
    for block in blocks:
        row = hashlib.blake2b(row + states[block], digest_size=DIGEST_BYTES, key=bytes([block])).digest()
        states[block] = row
    return row


def _token(row: bytes) -> int:
    return FIRST_BYTE + int.from_bytes(row, "little") % 256


class StillWorker:
    """One stage's answers, without a process around it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.stage, self.num_stages = int(environment["STAGE"]), int(environment["NUM_STAGES"])
        self.chunk = int(environment.get("STILL_CHUNK", "8"))
        self.context = int(environment.get("STILL_CONTEXT", "64"))
        self.hidden_dim = int(environment.get("STILL_DIM", "16"))
        self.dtype = environment.get("PPSMOKE_NODE_WIRE_DTYPE", "bfloat16")
        self.eog_at = int(environment.get("STILL_EOG_AT", "0"))
        share = BLOCKS // self.num_stages
        last = self.stage == self.num_stages - 1
        self.blocks = range(self.stage * share, BLOCKS if last else (self.stage + 1) * share)
        self.position = self.sampled = 0
        self.states = [b""] * BLOCKS

    def ready(self) -> dict[str, Any]:
        model = {"name": "still", "sha256": None, "blocks": BLOCKS, "context": self.context}
        return {
            **{"status": "ready", "pid": os.getpid(), "stage": self.stage, "device": "NONE", "chunk": self.chunk},
            **{"context": self.context, "blocks": [self.blocks.start, self.blocks.stop], "total_blocks": BLOCKS},
            **{"hidden_dim": self.hidden_dim, "weight_bytes": 0, "bytes_read": 0, "load_s": 0.0, "warmup_s": 0.0},
            **{"peak_rss_bytes": 0, "model": model, "fingerprint": "00", "eog": [EOG]},
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = getattr(self, f"op_{request.get('op')}", self.op_unknown)(request)
        except Refused as refused:
            kind, message = refused.args
            return {"request_id": request.get("request_id"), "error": {"kind": kind, "message": message}}
        return {"request_id": request.get("request_id"), "compute_us": 10 + self.stage, **reply}

    def op_unknown(self, request: dict[str, Any]) -> dict[str, Any]:
        raise Refused("op", f"no such op: {request.get('op')}")

    def op_tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": encode(request["prompt"], raw=request["raw"])}

    def op_detokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"text": decode(request["tokens"])}

    def op_reset(self, request: dict[str, Any]) -> dict[str, Any]:
        self.position = self.sampled = 0
        self.states = [b""] * BLOCKS
        return {"ok": True}

    def op_embed_and_forward(self, request: dict[str, Any]) -> dict[str, Any]:
        rows = [token.to_bytes(DIGEST_BYTES, "little") for token in request["tokens"]]
        return self._hidden(self._forward(rows, request["position"]))

    def op_decode_step(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.op_embed_and_forward({"tokens": [request["token_id"]], "position": request["position"]})

    def op_forward(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._hidden(self._forward(self._rows(request), request["position"]))

    def op_forward_and_sample(self, request: dict[str, Any]) -> dict[str, Any]:
        rows = self._forward(self._rows(request), request["position"])
        return self._sample(rows[-1], request["sample"])

    def op_embed_and_sample(self, request: dict[str, Any]) -> dict[str, Any]:
        rows = [token.to_bytes(DIGEST_BYTES, "little") for token in request["tokens"]]
        rows = self._forward(rows, request["position"])
        return self._sample(rows[-1], request.get("sample", True))

    def _forward(self, rows: list[bytes], position: int) -> list[bytes]:
        if position != self.position:
            raise Refused("position", f"position {position} with {self.position} tokens in the cache")
        if len(rows) > self.chunk:
            raise Refused("chunk", f"{len(rows)} positions in one call")
        if position + len(rows) > self.context:
            raise Refused("context", f"{position + len(rows)} positions in a context of {self.context}")
        self.position += len(rows)
        return [_blocks(row, self.states, self.blocks) for row in rows]

    def _hidden(self, rows: list[bytes]) -> dict[str, Any]:
        row_bytes = self.hidden_dim * ITEM_BYTES[self.dtype]
        data = b"".join(row.ljust(row_bytes, b"\0") for row in rows)
        return {"hidden_b64": base64.b64encode(data).decode(), "dtype": self.dtype, "seq_len": len(rows)}

    def _rows(self, request: dict[str, Any]) -> list[bytes]:
        data, row_bytes = base64.b64decode(request["hidden_b64"]), self.hidden_dim * ITEM_BYTES[request["dtype"]]
        if len(data) != request["seq_len"] * row_bytes:
            raise Refused("length", f"{len(data)} bytes for {request['seq_len']} positions")
        return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), row_bytes)]

    def _sample(self, row: bytes, sample: bool) -> dict[str, Any]:
        self.sampled += bool(sample)
        token = EOG if self.sampled == self.eog_at else _token(row)
        return {"token_id": token if sample else None}


def serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """The worker's main: what ppsmoke.worker.__main__:serve is for a real model."""
    faults = [fault.partition("@")[::2] for fault in os.environ.get("STILL_FAULT", "").split(",") if fault]
    if path := os.environ.get("STILL_PIDS"):
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
    _say(replies, {"status": "loading", "what": "nothing", "done": 1, "total": 2})
    _misbehave("load", faults, replies)
    worker, slow_s = StillWorker(os.environ), float(os.environ.get("STILL_SLOW_S", "0"))
    _say(replies, worker.ready())
    for count, line in enumerate(requests, start=1):
        time.sleep(slow_s)
        request = json.loads(line)
        answer = worker.answer(request)
        kind = _misbehave(str(count), faults, replies)
        if kind == "error":
            answer = {"request_id": request["request_id"], "error": {"kind": "fault", "message": "asked to refuse"}}
        elif kind == "wrongid":
            answer["request_id"] = 999
        _say(replies, answer)
    return 0


def _say(replies: BinaryIO, message: dict[str, Any]) -> None:
    write_all(replies, json.dumps(message).encode() + b"\n")


def _misbehave(moment: str, faults: list[tuple[str, str]], replies: BinaryIO) -> str:
    """Do what STILL_FAULT asks for at this moment; the kinds that only change the answer are returned."""
    changed = ""
    for kind, when in faults:
        if when != moment:
            continue
        if kind == "die":
            print("about to die, as asked", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "exit":
            raise ValueError("an uncaught error, as asked")
        elif kind == "fail":
            error = {"kind": "model", "message": "the model is bad, as asked", "hint": "take another"}
            _say(replies, {"status": "failed", "error": error})
            sys.exit(1)
        elif kind == "hang":
            time.sleep(600)
        elif kind == "gate":
            while os.path.exists(os.environ["STILL_GATE"]):
                time.sleep(0.01)
        elif kind == "garbage":
            replies.write(b"\xff\x00 this is no JSON\n")
        elif kind == "flood":
            for number in range(20_000):
                print(f"line {number} of a flood, forty characters long", file=sys.stderr)
        elif kind == "print":
            print("a stray print")
            os.write(1, b"a stray write to fd 1\n")
            subprocess.run(["sh", "-c", "echo a stray echo"], check=True)
        elif kind == "child":
            child = subprocess.Popen(["sleep", "600"])
            if path := os.environ.get("STILL_PIDS"):
                with open(path, "a") as file:
                    file.write(f"{child.pid}\n")
        else:
            changed = kind
    return changed
