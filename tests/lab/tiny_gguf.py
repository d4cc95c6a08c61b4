"""A writer of small GGUF files: random Llama models of any shape, and files that are wrong in one chosen place.

Needs numpy for the weights alone. Written from ggml's docs/gguf.md, not from our reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# ggml.h: number, weights a block, bytes a block
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q6_K": (14, 256, 210),
}
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

LLAMA3_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
    "\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
LLAMA3_CONTROL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Enough to see merging at work: every part but the last letters is the result of an earlier line.
MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "o u", "h e", "l l", "he ll", "hell o", "Ġ Ġ")


@dataclass(frozen=True)
class Typed:
    """A metadata value of a chosen type; plain Python values get the usual one."""

    kind: int
    value: Any


@dataclass(frozen=True)
class TensorBytes:
    """A tensor's entry and bytes. dims in ggml's order; offset: where the table says it lies (None: where it does)."""

    name: str
    dims: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


def gguf_bytes(
    metadata: Iterable[tuple[str, Any]],
    tensors: Sequence[TensorBytes] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    magic: bytes = b"GGUF",
    claimed_tensors: int | None = None,
    claimed_keys: int | None = None,
) -> bytes:
    """A file. The claimed counts replace the true ones."""
    pairs = list(metadata)
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if claimed_tensors is None else claimed_tensors,
        len(pairs) if claimed_keys is None else claimed_keys,
    )
    head += b"".join(string(key) + value(item) for key, item in pairs)
    body, rows = b"", b""
    for tensor in tensors:
        body += bytes(-len(body) % alignment)
        offset = len(body) if tensor.offset is None else tensor.offset
        rows += string(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        rows += struct.pack("<IQ", tensor.type, offset)
        body += tensor.data
    head += rows
    return head + bytes(-len(head) % alignment) + body


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """The type and bytes of a metadata value."""
    match item:
        case Typed(kind=kind, value=inner):
            return struct.pack("<I", kind) + (inner if isinstance(inner, bytes) else _scalar(kind, inner))
        case bool():
            return struct.pack("<I?", BOOL, item)
        case int():
            return struct.pack("<II", U32, item)
        case float():
            return struct.pack("<If", F32, item)
        case str() | bytes():
            return struct.pack("<I", STRING) + string(item)
        case [str() | bytes(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(string, item))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(item)}i", ARRAY, I32, len(item), *item)
        case _:
            raise TypeError(f"no GGUF type for {item!r}")


def _scalar(kind: int, item: Any) -> bytes:
    return string(item) if kind == STRING else struct.pack("<" + _CODES[kind], item)


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """A random model. type: of all matrices in the blocks; embedding_type: of token_embd and output (None: type).

    Widths must be multiples of the type's block (256 for Q4_K and Q6_K). merges and control are added to the 256 bytes.
    """

    blocks: int = 2
    width: int = 64
    feed_forward: int = 128
    heads: int = 4
    kv_heads: int = 2
    context: int = 256
    type: str = "F32"
    embedding_type: str | None = None
    output: str = "tied"  # or "own"
    rope_freqs: Sequence[float] | None = None
    rope_base: float = 500_000.0
    pre: str = "llama-bpe"
    merges: Sequence[str] = MERGES
    control: Sequence[str] = LLAMA3_CONTROL
    template: str | None = LLAMA3_TEMPLATE
    architecture: str = "llama"
    version: int = 3
    seed: int = 0

    def tokens(self) -> list[str]:
        made = [merge.replace(" ", "") for merge in self.merges]
        return [*byte_characters(), *made, *self.control]

    def metadata(self) -> list[tuple[str, Any]]:
        tokens, prefix = self.tokens(), self.architecture
        normal = len(tokens) - len(self.control)
        pairs: list[tuple[str, Any]] = [
            ("general.architecture", self.architecture),
            ("general.name", f"tiny-{self.seed}"),
            (f"{prefix}.block_count", self.blocks),
            (f"{prefix}.context_length", self.context),
            (f"{prefix}.embedding_length", self.width),
            (f"{prefix}.feed_forward_length", self.feed_forward),
            (f"{prefix}.attention.head_count", self.heads),
            (f"{prefix}.attention.head_count_kv", self.kv_heads),
            (f"{prefix}.attention.layer_norm_rms_epsilon", 1e-5),
            (f"{prefix}.rope.freq_base", self.rope_base),
            (f"{prefix}.rope.dimension_count", self.width // self.heads),
            (f"{prefix}.vocab_size", len(tokens)),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", self.pre),
            ("tokenizer.ggml.tokens", tokens),
            ("tokenizer.ggml.token_type", [1] * normal + [3] * len(self.control)),
            ("tokenizer.ggml.merges", list(self.merges)),
        ]
        if self.control:
            pairs += [("tokenizer.ggml.bos_token_id", normal), ("tokenizer.ggml.eos_token_id", len(tokens) - 1)]
            pairs += [("tokenizer.ggml.add_bos_token", True)]
        if self.template:
            pairs += [("tokenizer.chat_template", self.template)]
        return pairs

    def tensors(self) -> list[TensorBytes]:
        random = np.random.default_rng(self.seed)
        kv_width, vocabulary = self.width // self.heads * self.kv_heads, len(self.tokens())
        embedding_type = self.embedding_type or self.type
        made = [random_tensor(random, "token_embd.weight", (self.width, vocabulary), embedding_type)]
        for block in range(self.blocks):
            for name, dims, kind in (
                ("attn_norm", (self.width,), "norm"),
                ("attn_q", (self.width, self.width), self.type),
                ("attn_k", (self.width, kv_width), self.type),
                ("attn_v", (self.width, kv_width), self.type),
                ("attn_output", (self.width, self.width), self.type),
                ("ffn_norm", (self.width,), "norm"),
                ("ffn_gate", (self.width, self.feed_forward), self.type),
                ("ffn_up", (self.width, self.feed_forward), self.type),
                ("ffn_down", (self.feed_forward, self.width), self.type),
            ):
                made.append(random_tensor(random, f"blk.{block}.{name}.weight", dims, kind))
        made.append(random_tensor(random, "output_norm.weight", (self.width,), "norm"))
        if self.output == "own":
            made.append(random_tensor(random, "output.weight", (self.width, vocabulary), embedding_type))
        if self.rope_freqs is not None:
            data = np.asarray(self.rope_freqs, "<f4")
            made.append(TensorBytes("rope_freqs.weight", (len(data),), 0, data.tobytes()))
        return made

    def to_bytes(self) -> bytes:
        return gguf_bytes(self.metadata(), self.tensors(), version=self.version)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def byte_characters() -> list[str]:
    """GPT-2's 256 characters, in the order of its vocabulary: printable bytes first."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]


def random_tensor(random: np.random.Generator, name: str, dims: tuple[int, ...], kind: str) -> TensorBytes:
    """Values of about the size that a trained model has: rows keep a vector's length, norms are near one."""
    if kind == "norm":
        return TensorBytes(name, dims, 0, random.uniform(0.7, 1.3, dims[0]).astype("<f4").tobytes())
    number, weights, nbytes = TYPES[kind]
    count, size = int(np.prod(dims)), dims[0] ** -0.5
    if kind in ("F32", "F16"):
        data = (random.standard_normal(count) * size).astype("<f4" if kind == "F32" else "<f2").tobytes()
    else:
        data = _random_blocks(random, kind, count // weights, nbytes, size).tobytes()
    return TensorBytes(name, dims, number, data)


def _random_blocks(random: np.random.Generator, kind: str, count: int, nbytes: int, size: float) -> np.ndarray:
    """Random quants, and scales that make their values about as large as `size`."""
    blocks = random.integers(0, 256, (count, nbytes), np.uint8)
    # where the 16-bit scale lies, its size per unit of the weights; where the minimum lies, its multiple of the scale
    at, unit, minimum_at, minimum = {
        "Q4_0": (0, 1 / 5, None, 0.0),
        "Q4_1": (0, 1 / 5, 2, -7.5),
        "Q8_0": (0, 1 / 74, None, 0.0),
        "Q4_K": (0, 1 / 170, 2, 7.5),
        "Q6_K": (208, 1 / 1400, None, 0.0),
    }[kind]
    scales = (random.uniform(0.5, 1.5, count) * unit * size).astype("<f2")
    blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if minimum_at is not None:
        minima = (scales.astype(np.float32) * minimum).astype("<f2")
        blocks[:, minimum_at : minimum_at + 2] = minima.view(np.uint8).reshape(-1, 2)
    return blocks
