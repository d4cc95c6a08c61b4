"""What stages and the orchestrator say to each other: frozen dataclasses, and their bytes.

On the wire: one byte of kind, the scalars of the message as one little-endian struct in the order of their fields, then
the lengths-first fields in theirs. A message that exists is consistent: both ways of making one run the same checks.
This module knows no link, no worker and no tensor. The names of the fields are the specification's, section 3.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from ppsmoke.errors import MessageError

Dtype = Literal["bfloat16", "float16", "float32"]
State = Literal["loading", "ready", "prefill", "token", "failed", "linked"]
FinishReason = Literal["stop", "length"]
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
NO_TOKEN = -1
MAX_TEXT_BYTES = 8 << 20  # twice the longest prompt; as Python's text it may take four times as much
MAX_NUMBERS = 1 << 20  # tokens or figures: eight times the longest context; as Python's numbers each takes 40 bytes
_ADDRESS = re.compile(r"[0-9a-f]{16}/[A-Za-z0-9._-]{1,64}")


def _scalar(code: str) -> Any:
    return field(metadata={"code": code})


def _choice(words: Any) -> Any:
    return field(metadata={"code": "B", "words": get_args(words)})


def _sized(kind: Literal["text", "bytes", "u32s"], default: Any = ...) -> Any:
    return field(metadata={"sized": kind}) if default is ... else field(default=default, metadata={"sized": kind})


class _Message:
    def __post_init__(self) -> None:
        """Raises MessageError, naming the field, when a value does not fit its type or contradicts another."""
        for name, check in _LAYOUTS[type(self)].checks:
            if complaint := check(getattr(self, name)):
                raise self._wrong(name, complaint)
        self._check()

    def _check(self) -> None:
        """What holds between the fields; the subclass says."""

    def _wrong(self, name: str, complaint: str) -> MessageError:
        return MessageError(f"{type(self).__name__}.{name}: {complaint}")

    def _check_address(self, name: str) -> None:
        if not _ADDRESS.fullmatch(getattr(self, name)):
            raise self._wrong(name, "no address of the form <node id>/<mailbox>")


@dataclass(frozen=True, kw_only=True)
class InferenceRequest(_Message):
    """Orchestrator to stage 0. request_id is the asker's choice, not 0; raw: the prompt without the chat template."""

    request_id: int = _scalar("Q")
    max_tokens: int = _scalar("I")
    raw: bool = _scalar("?")
    reply_to: str = _sized("text")
    prompt: str = _sized("text")

    def _check(self) -> None:
        _check_request_id(self)
        self._check_address("reply_to")


@dataclass(frozen=True, kw_only=True)
class StageActivation(_Message):
    """Stage i to stage i + 1: `hidden` is [seq_len, hidden_dim], little-endian, for the positions from `position` on.

    The message with position 0, a request's first, also carries reply_to, max_tokens (already clipped to the context)
    and all prompt_token_ids; no other does. last_chunk: sample after it. compute_us: one figure per stage so far.
    """

    request_id: int = _scalar("Q")
    position: int = _scalar("I")
    seq_len: int = _scalar("I")
    hidden_dim: int = _scalar("I")
    dtype: Dtype = _choice(Dtype)
    is_prefill: bool = _scalar("?")
    last_chunk: bool = _scalar("?")
    max_tokens: int = _scalar("I")
    reply_to: str = _sized("text", "")
    compute_us: tuple[int, ...] = _sized("u32s", ())
    prompt_token_ids: tuple[int, ...] = _sized("u32s", ())
    hidden: bytes = _sized("bytes")

    def _check(self) -> None:
        _check_request_id(self)
        if self.seq_len < 1 or (not self.is_prefill and self.seq_len != 1):
            raise self._wrong(
                "seq_len", f"{self.seq_len} positions in a {'prefill' if self.is_prefill else 'decode step'}"
            )
        expected = self.seq_len * self.hidden_dim * ITEM_BYTES[self.dtype]
        if self.hidden_dim < 1 or len(self.hidden) != expected:
            shape = f"{self.seq_len} x {self.hidden_dim} of {self.dtype}"
            raise self._wrong("hidden", f"{len(self.hidden)} bytes where {shape} takes {expected}")
        if not self.is_prefill and not self.last_chunk:
            raise self._wrong("last_chunk", "false in a decode step")
        if self.position == 0:
            self._check_first()
        elif self.reply_to or self.max_tokens or self.prompt_token_ids:
            raise self._wrong("reply_to", "set, with max_tokens or prompt_token_ids, beyond a request's first message")

    def _check_first(self) -> None:
        self._check_address("reply_to")
        if not self.is_prefill:
            raise self._wrong("is_prefill", "false at position 0")
        if self.max_tokens < 1:
            raise self._wrong("max_tokens", "0 in a request's first message")
        prompt, chunk = len(self.prompt_token_ids), self.seq_len
        if prompt < chunk or (prompt == chunk) != self.last_chunk:
            last = "the last chunk" if self.last_chunk else "not the last chunk"
            raise self._wrong("prompt_token_ids", f"{prompt} tokens, but {chunk} positions are {last}")


@dataclass(frozen=True, kw_only=True)
class NextToken(_Message):
    """The exit to stage 0: feed token_id at `position`; or, with done, forget the request and send a Reset on.

    A later stage that cannot go on with a request frees the chain with the same done. compute_us as in StageActivation.
    """

    request_id: int = _scalar("Q")
    token_id: int = _scalar("I")
    position: int = _scalar("I")
    done: bool = _scalar("?")
    compute_us: tuple[int, ...] = _sized("u32s", ())

    def _check(self) -> None:
        _check_request_id(self)


@dataclass(frozen=True, kw_only=True)
class InferenceResponse(_Message):
    """The exit to reply_to. token_ids ends with the end-of-generation token if there was one; text is without it.

    timings_json: {"prefill_us", "token_us": [...], "stage_us": [[...], ...]}, see generation.Generation.timings.
    """

    request_id: int = _scalar("Q")
    finish_reason: FinishReason = _choice(FinishReason)
    token_ids: tuple[int, ...] = _sized("u32s")
    prompt_token_ids: tuple[int, ...] = _sized("u32s")
    text: str = _sized("text")
    timings_json: str = _sized("text", "{}")

    def _check(self) -> None:
        _check_request_id(self)
        if not self.token_ids:
            raise self._wrong("token_ids", "empty")


@dataclass(frozen=True, kw_only=True)
class StageStatus(_Message):
    """Any stage to the orchestrator, never waited for. loading: done of total bytes of `what`; prefill: positions;
    token: done tokens of at most total, token_id the newest; ready: detail_json is the worker's ready line;
    linked: detail_json is a list of this stage's links, {"to", "path", "rtt_ms"}."""

    stage: int = _scalar("I")
    state: State = _choice(State)
    done: int = _scalar("Q")
    total: int = _scalar("Q")
    token_id: int = _scalar("q")
    what: str = _sized("text", "")
    detail_json: str = _sized("text", "")

    def _check(self) -> None:
        if not NO_TOKEN <= self.token_id < 1 << 32:
            raise self._wrong("token_id", f"{self.token_id} is neither a token nor {NO_TOKEN}")


@dataclass(frozen=True, kw_only=True)
class StageFailed(_Message):
    """Any stage to the orchestrator: it ends the run. request_id is 0 where no request was concerned."""

    request_id: int = _scalar("Q")
    stage: int = _scalar("I")
    phase: str = _sized("text")
    cause: str = _sized("text")
    detail: str = _sized("text", "")
    hint: str = _sized("text", "")

    def _check(self) -> None:
        if not self.cause:
            raise self._wrong("cause", "empty")


@dataclass(frozen=True, kw_only=True)
class Reset(_Message):
    """Stage i to stage i + 1: the request is over, forget its positions. The orchestrator to stage 0: it has given the
    request up, for which a token may never come any more."""

    request_id: int = _scalar("Q")

    def _check(self) -> None:
        _check_request_id(self)


Message = InferenceRequest | StageActivation | NextToken | InferenceResponse | StageStatus | StageFailed | Reset
M = TypeVar("M", bound=_Message)
_KINDS: dict[int, type] = dict(enumerate(get_args(Message), start=1))


def encode(message: Message) -> bytes:
    """The message's bytes; decode gives an equal message back."""
    layout = _LAYOUTS[type(message)]
    scalars = [words.index(value) if words else value for value, words in layout.scalar_values(message)]
    parts = [layout.header.pack(layout.kind, *scalars)]
    for name, kind in layout.sized:
        value = getattr(message, name)
        body = value.encode() if kind == "text" else struct.pack(f"<{len(value)}I", *value) if kind == "u32s" else value
        parts += [_LENGTH.pack(len(body)), body]
    return b"".join(parts)


def decode(data: bytes) -> Message:
    """The message in these bytes. Raises MessageError, naming the field, for anything else.

    Nothing is allocated on the word of a length: it is compared with the bytes that are there first.
    """
    layout = _LAYOUTS.get(_KINDS.get(data[0]) if data else None)  # type: ignore[arg-type]
    if layout is None:
        raise MessageError(f"kind: {f'{data[0]} is unknown' if data else 'missing, the message is empty'}")
    values = layout.unpack_scalars(data)
    offset = layout.header.size
    for name, kind in layout.sized:
        if len(data) - offset < _LENGTH.size:
            raise layout.wrong(name, f"cut off at byte {len(data)}")
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        if length > len(data) - offset:
            raise layout.wrong(name, f"{length} bytes claimed, {len(data) - offset} are there")
        values[name] = layout.sized_value(name, kind, data[offset : offset + length])
        offset += length
    if offset != len(data):
        raise MessageError(f"{layout.type.__name__}: {len(data) - offset} bytes after its end")
    return layout.type(**values)


_LENGTH = struct.Struct("<I")
_LIMITS = {"I": (0, (1 << 32) - 1), "Q": (0, (1 << 64) - 1), "q": (-(1 << 63), (1 << 63) - 1)}


class _Layout:
    """How one type of message lies in its bytes, read once from its fields."""

    def __init__(self, kind: int, message_type: type) -> None:
        self.kind = kind
        self.type = message_type
        meta = {f.name: f.metadata for f in fields(message_type)}
        self.scalars = [(name, m["code"], m.get("words", ())) for name, m in meta.items() if "code" in m]
        self.sized = [(name, m["sized"]) for name, m in meta.items() if "sized" in m]
        # "?" travels as a byte: struct would read any byte but 0 as true, and two encodings of one message would exist
        self.header = struct.Struct("<B" + "".join(code.replace("?", "B") for _, code, _ in self.scalars))
        self.checks = [(name, _scalar_check(code, words)) for name, code, words in self.scalars]
        self.checks += [(name, _SIZED_CHECKS[kind]) for name, kind in self.sized]

    def wrong(self, name: str, complaint: str) -> MessageError:
        return MessageError(f"{self.type.__name__}.{name}: {complaint}")

    def scalar_values(self, message: Message) -> list[tuple[Any, tuple[str, ...]]]:
        return [(getattr(message, name), words) for name, _, words in self.scalars]

    def unpack_scalars(self, data: bytes) -> dict[str, Any]:
        if len(data) < self.header.size:
            raise MessageError(f"{self.type.__name__}: header cut off at byte {len(data)} of {self.header.size}")
        values: dict[str, Any] = {}
        for (name, code, words), value in zip(self.scalars, self.header.unpack_from(data)[1:], strict=True):
            if words:
                if value >= len(words):
                    raise self.wrong(name, f"{value} is no choice of {', '.join(words)}")
                value = words[value]
            elif code == "?":
                if value > 1:
                    raise self.wrong(name, f"{value} is neither 0 nor 1")
                value = bool(value)
            values[name] = value
        return values

    def sized_value(self, name: str, kind: str, body: bytes) -> Any:
        if kind == "bytes":
            return body
        if kind == "u32s":
            if len(body) % 4:
                raise self.wrong(name, f"{len(body)} bytes are no whole number of tokens or figures")
            if len(body) > 4 * MAX_NUMBERS:
                raise self.wrong(name, f"{len(body) // 4} numbers, at most {MAX_NUMBERS} are allowed")
            return struct.unpack(f"<{len(body) // 4}I", body)
        if len(body) > MAX_TEXT_BYTES:
            raise self.wrong(name, f"{len(body)} bytes, at most {MAX_TEXT_BYTES} are allowed")
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise self.wrong(name, f"no UTF-8 at byte {error.start}") from error


def _scalar_check(code: str, words: tuple[str, ...]) -> Callable[[Any], str]:
    if words:
        return lambda value: "" if value in words else f"{value!r} is no choice of {', '.join(words)}"
    if code == "?":
        return lambda value: "" if value is True or value is False else f"{value!r} is neither true nor false"
    low, high = _LIMITS[code]
    return lambda value: "" if type(value) is int and low <= value <= high else f"{value!r} is not in {low}..{high}"


def _text_check(value: Any) -> str:
    if not isinstance(value, str):
        return f"{type(value).__name__} is no text"
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair, which UTF-8 cannot carry"
    return "" if size <= MAX_TEXT_BYTES else f"{size} bytes, at most {MAX_TEXT_BYTES} are allowed"


def _u32s_check(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{type(value).__name__} is no tuple"
    if len(value) > MAX_NUMBERS:
        return f"{len(value)} numbers, at most {MAX_NUMBERS} are allowed"
    try:
        struct.pack(f"<{len(value)}I", *value)
    except struct.error:
        return "something other than numbers from 0 to 2^32 - 1 in it"
    return ""


def _bytes_check(value: Any) -> str:
    return "" if isinstance(value, bytes) else f"{type(value).__name__} is no bytes"


def _check_request_id(message: Any) -> None:
    if message.request_id == 0:
        raise message._wrong("request_id", "0 means no request")


_SIZED_CHECKS: dict[str, Callable[[Any], str]] = {"text": _text_check, "bytes": _bytes_check, "u32s": _u32s_check}
_LAYOUTS: dict[type, _Layout] = {message_type: _Layout(kind, message_type) for kind, message_type in _KINDS.items()}
