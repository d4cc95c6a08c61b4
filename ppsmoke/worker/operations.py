"""The worker's operations: a JSON object in, a JSON object out. Everything that comes in is checked here.

Op table: design, "Worker". An operation belongs to a role (first, middle, last, only) and is refused elsewhere.
"""

from __future__ import annotations

import binascii
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ppsmoke.errors import SmokeError
from ppsmoke.worker.hidden import WIRE_DTYPES, from_wire, to_wire
from ppsmoke.worker.stage_model import ContextFull, NotNumbers, StageModel, WrongPosition
from ppsmoke.worker.tokenizer import Tokenizer


class RequestError(Exception):
    """A request that is answered with an error; kind is one word for programs."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Operations:
    """One stage's operations over its model."""

    def __init__(self, model: StageModel, tokenizer: Tokenizer, *, wire_dtype: str) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._wire_dtype = wire_dtype
        self._compute_s = 0.0
        self._ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"reset": self._reset}
        if model.is_first:
            self._ops["tokenize"] = self._tokenize
        if model.is_last:
            self._ops["detokenize"] = self._detokenize
        if model.is_first and model.is_last:
            self._ops["embed_and_sample"] = self._embed_and_sample
        elif model.is_first:
            self._ops |= {"embed_and_forward": self._embed_and_forward, "decode_step": self._decode_step}
        elif model.is_last:
            self._ops["forward_and_sample"] = self._forward_and_sample
        else:
            self._ops["forward"] = self._forward

    def handle(self, request: Any) -> dict[str, Any]:
        """The reply to a decoded line. Raises RequestError for what is wrong with it."""
        if not isinstance(request, dict):
            raise RequestError("bad_request", "a request is a JSON object")
        op = request.get("op")
        if not isinstance(op, str) or op not in self._ops:
            known = ", ".join(sorted(self._ops))
            raise RequestError("unknown_op", f"this stage has no op {op!r:.60}; it has {known}")
        self._compute_s = 0.0
        try:
            reply = self._ops[op](request)
        except WrongPosition as error:
            raise RequestError("position", str(error)) from error
        except NotNumbers as error:
            raise RequestError("numbers", str(error)) from error
        except ContextFull as error:
            raise RequestError("context", str(error)) from error
        return reply | {"compute_us": round(self._compute_s * 1e6)}

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        self._model.reset()
        return {"ok": True}

    def _tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request.get("prompt")
        if not isinstance(prompt, str):
            raise RequestError("bad_request", "prompt is not a string")
        try:
            return {"tokens": list(self._tokenizer.prompt_ids(prompt, raw=_flag(request, "raw")))}
        except SmokeError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise RequestError("prompt", f"{error.cause}{hint}") from error

    def _detokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"text": self._tokenizer.decode(self._token_ids(request.get("tokens"), "tokens", may_be_empty=True))}

    def _embed_and_forward(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = self._chunk_of_tokens(request)
        return self._embedded_forward(tokens, _position(request))

    def _decode_step(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = self._token_ids([request.get("token_id")], "token_id")
        return self._embedded_forward(tokens, _position(request))

    def _embedded_forward(self, tokens: list[int], position: int) -> dict[str, Any]:
        return self._hidden_reply(
            self._timed(lambda: self._model.forward(self._model.embed(tokens), position=position))
        )

    def _forward(self, request: dict[str, Any]) -> dict[str, Any]:
        hidden, position = self._hidden(request), _position(request)
        return self._hidden_reply(self._timed(lambda: self._model.forward(hidden, position=position)))

    def _forward_and_sample(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._sampled(request, self._hidden(request))

    def _embed_and_sample(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._sampled(request, self._model.embed(self._chunk_of_tokens(request)))

    def _sampled(self, request: dict[str, Any], hidden: np.ndarray) -> dict[str, Any]:
        position, sample = _position(request), _flag(request, "sample", default=True)
        token = self._timed(lambda: self._model.forward_and_sample(hidden, position=position, sample=sample))
        return {"token_id": token}

    def _timed(self, compute: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return compute()
        finally:
            self._compute_s += time.perf_counter() - start

    def _hidden(self, request: dict[str, Any]) -> np.ndarray:
        """The (seq_len, dim) array of a request, after its fields were checked against each other."""
        seq_len = _integer(request, "seq_len")
        if not 1 <= seq_len <= self._model.chunk:
            raise RequestError("hidden", f"seq_len {seq_len} is not within 1..{self._model.chunk}, this worker's chunk")
        dtype, encoded = request.get("dtype"), request.get("hidden_b64")
        if dtype not in WIRE_DTYPES:
            raise RequestError("hidden", f"dtype {dtype!r:.40} is none of {', '.join(WIRE_DTYPES)}")
        if not isinstance(encoded, str):
            raise RequestError("bad_request", "hidden_b64 is not a string")
        try:
            data = binascii.a2b_base64(encoded, strict_mode=True)
            return from_wire(data, dtype, (seq_len, self._model.config.dim))
        except ValueError as error:
            raise RequestError("hidden", f"hidden_b64: {error}") from error

    def _hidden_reply(self, hidden: np.ndarray) -> dict[str, Any]:
        encoded = binascii.b2a_base64(to_wire(hidden, self._wire_dtype), newline=False).decode()
        return {"hidden_b64": encoded, "dtype": self._wire_dtype, "seq_len": len(hidden)}

    def _chunk_of_tokens(self, request: dict[str, Any]) -> list[int]:
        tokens = self._token_ids(request.get("tokens"), "tokens")
        if len(tokens) > self._model.chunk:
            raise RequestError("tokens", f"{len(tokens)} tokens; this worker takes {self._model.chunk} in a call")
        return tokens

    def _token_ids(self, tokens: Any, name: str, *, may_be_empty: bool = False) -> list[int]:
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):  # a bool is no token
            raise RequestError("bad_request", f"{name} holds something that is no integer")
        if not tokens and not may_be_empty:
            raise RequestError("tokens", f"{name} is empty")
        vocabulary = self._model.config.vocabulary
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise RequestError("tokens", f"token {str(token)[:20]} is not within 0..{vocabulary - 1}")
        return tokens


def _position(request: dict[str, Any]) -> int:
    position = _integer(request, "position")
    if position < 0:
        raise RequestError("position", f"position {str(position)[:20]} is negative")
    return position


def _integer(request: dict[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int:
        raise RequestError("bad_request", f"{name} is not an integer")
    return value


def _flag(request: dict[str, Any], name: str, *, default: bool = False) -> bool:
    value = request.get(name, default)
    if type(value) is not bool:
        raise RequestError("bad_request", f"{name} is neither true nor false")
    return value
