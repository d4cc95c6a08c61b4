"""The worker's operations as typed calls: JSON and base64 end here, and a worker's nonsense becomes a named error."""

from __future__ import annotations

import asyncio
import binascii
from dataclasses import dataclass
from typing import Any, Protocol

from ppsmoke.errors import StageError, WorkerLost
from ppsmoke.pipeline.messages import ITEM_BYTES, Dtype

STEP_DEADLINE_S = 30.0  # design, "One run": 30 s in which no stage finished a step or a chunk is a failure
MAX_HIDDEN_BYTES = 8 << 20  # of one call: as base64 it fits a line of the bridge, raw it fits a frame of a link


class Worker(Protocol):
    """What of a Bridge is needed here; tests bring one that runs in their own process."""

    ready: asyncio.Future[dict[str, Any]]
    lost: asyncio.Future[WorkerLost]

    async def call(self, op: str, *, deadline_s: float, **fields: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Hidden:
    """Hidden states [seq_len, hidden_dim], little-endian, and what computing them took in microseconds."""

    data: bytes
    dtype: Dtype
    seq_len: int
    compute_us: int = 0

    def rows(self, start: int, stop: int) -> Hidden:
        row = len(self.data) // self.seq_len
        return Hidden(self.data[start * row : stop * row], self.dtype, min(stop, self.seq_len) - start)


@dataclass(frozen=True)
class Sampled:
    """The token of highest logit after the last position given, and the compute in microseconds."""

    token_id: int
    compute_us: int


@dataclass(frozen=True)
class Loaded:
    """What the actor needs of a ready line. chunk: positions that a call may bring; context: positions in the cache."""

    chunk: int
    context: int
    hidden_dim: int
    eog: frozenset[int]

    @classmethod
    def parse(cls, ready: dict[str, Any], *, stage: int) -> Loaded:
        """Raises StageError, naming the field, for a ready line that does not hold these."""
        values = {name: ready.get(name) for name in ("chunk", "context", "hidden_dim")}
        for name, value in values.items():
            if type(value) is not int or value < 1:
                raise StageError(f"the worker's ready line has {name} = {value!r}", phase="load", stage=stage)
        eog = ready.get("eog")
        if not isinstance(eog, list) or not all(type(token) is int for token in eog):
            raise StageError(f"the worker's ready line has eog = {eog!r:.80}", phase="load", stage=stage)
        chunk = min(values["chunk"], max(1, MAX_HIDDEN_BYTES // (values["hidden_dim"] * max(ITEM_BYTES.values()))))
        return cls(chunk, values["context"], values["hidden_dim"], frozenset(eog))


class Operations:
    """The operations of the design's table, in its order, for one stage. Each raises WorkerRefused, WorkerLost, or
    StageError when the reply makes no sense; each is given deadline_s, after which the worker counts as lost."""

    def __init__(self, worker: Worker, *, stage: int, deadline_s: float = STEP_DEADLINE_S) -> None:
        self._worker = worker
        self._stage = stage
        self._deadline_s = deadline_s

    async def tokenize(self, request_id: int, prompt: str, *, raw: bool) -> tuple[int, ...]:
        return self._tokens(await self._call("tokenize", request_id, prompt=prompt, raw=raw), "tokens", "tokenize")

    async def embed_and_forward(self, request_id: int, tokens: tuple[int, ...], position: int) -> Hidden:
        reply = await self._call("embed_and_forward", request_id, tokens=tokens, position=position)
        return self._hidden(reply, "embed_and_forward", len(tokens))

    async def decode_step(self, request_id: int, token_id: int, position: int) -> Hidden:
        return self._hidden(
            await self._call("decode_step", request_id, token_id=token_id, position=position), "decode_step", 1
        )

    async def forward(self, request_id: int, hidden: Hidden, position: int) -> Hidden:
        reply = await self._call("forward", request_id, position=position, **_json_hidden(hidden))
        return self._hidden(reply, "forward", hidden.seq_len)

    async def forward_and_sample(self, request_id: int, hidden: Hidden, position: int, *, sample: bool) -> Sampled:
        fields = {"position": position, "sample": sample, **_json_hidden(hidden)}
        reply = await self._call("forward_and_sample", request_id, **fields)
        return self._sampled(reply, "forward_and_sample", sample)

    async def embed_and_sample(
        self, request_id: int, tokens: tuple[int, ...], position: int, *, sample: bool
    ) -> Sampled:
        reply = await self._call("embed_and_sample", request_id, tokens=tokens, position=position, sample=sample)
        return self._sampled(reply, "embed_and_sample", sample)

    async def detokenize(self, request_id: int, tokens: list[int]) -> str:
        text = (await self._call("detokenize", request_id, tokens=tokens)).get("text")
        if not isinstance(text, str):
            raise self._nonsense("detokenize", "text", text)
        return text

    async def reset(self, request_id: int) -> None:
        await self._call("reset", request_id)

    async def _call(self, op: str, request_id: int, **fields: Any) -> dict[str, Any]:
        return await self._worker.call(op, deadline_s=self._deadline_s, request_id=request_id, **fields)

    def _hidden(self, reply: dict[str, Any], op: str, seq_len: int) -> Hidden:
        dtype, encoded = reply.get("dtype"), reply.get("hidden_b64")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._nonsense(op, "dtype", dtype)
        if reply.get("seq_len", seq_len) != seq_len:
            raise self._nonsense(op, "seq_len", reply.get("seq_len"))
        try:
            data = binascii.a2b_base64(encoded)
        except (ValueError, TypeError) as error:
            raise self._nonsense(op, "hidden_b64", encoded) from error
        return Hidden(data, dtype, seq_len, _compute_us(reply))

    def _sampled(self, reply: dict[str, Any], op: str, sample: bool) -> Sampled:
        token_id = reply.get("token_id")
        if sample and (type(token_id) is not int or not 0 <= token_id < 1 << 32):
            raise self._nonsense(op, "token_id", token_id)
        return Sampled(token_id if sample else 0, _compute_us(reply))

    def _tokens(self, reply: dict[str, Any], name: str, op: str) -> tuple[int, ...]:
        tokens = reply.get(name)
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < 1 << 32 for t in tokens):
            raise self._nonsense(op, name, tokens)
        return tuple(tokens)

    def _nonsense(self, op: str, name: str, value: Any) -> StageError:
        return StageError(f"the worker's answer to {op} has {name} = {value!r:.80}", phase="ask", stage=self._stage)


def _json_hidden(hidden: Hidden) -> dict[str, Any]:
    encoded = binascii.b2a_base64(hidden.data, newline=False).decode("ascii")
    return {"hidden_b64": encoded, "dtype": hidden.dtype, "seq_len": hidden.seq_len}


def _compute_us(reply: dict[str, Any]) -> int:
    value = reply.get("compute_us")
    return min(value, (1 << 32) - 1) if type(value) is int and value > 0 else 0
