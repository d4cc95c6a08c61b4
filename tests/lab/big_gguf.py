"""A GGUF file of llama3.2:1b's shape, vocabulary size and mixture of types (Q4_K_M), with random weights.

Written front to back in pieces: 0.8 GB of file take 90 MB of memory, most of them the tokenizer's and numpy's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.lab.tiny_gguf import (
    LLAMA3_CONTROL,
    TYPES,
    TensorBytes,
    TinyLlama,
    byte_characters,
    gguf_bytes,
    random_tensor,
)

VOCABULARY, CONTROL = 128_256, 256
PIECE_ROWS = 1024  # of a matrix at a time: 7 MB of the widest
ALIGNMENT = 32


@dataclass(frozen=True)
class _Planned:
    """A tensor before it has bytes; dims in ggml's order."""

    name: str
    dims: tuple[int, ...]
    kind: str  # a ggml type, or "norm" or "rope": F32

    @property
    def number(self) -> int:
        return TYPES.get(self.kind, TYPES["F32"])[0]

    @property
    def nbytes(self) -> int:
        _, weights, nbytes = TYPES.get(self.kind, TYPES["F32"])
        return math.prod(self.dims) // weights * nbytes


@dataclass(frozen=True, kw_only=True)
class BigLlama(TinyLlama):
    """llama3.2:1b but for its numbers and its words."""

    blocks: int = 16
    width: int = 2048
    feed_forward: int = 8192
    heads: int = 32
    kv_heads: int = 8
    context: int = 131_072
    control: tuple[str, ...] = (*LLAMA3_CONTROL[:-1], *(f"<|reserved_{n}|>" for n in range(CONTROL - 5)), "<|eot_id|>")
    words: list[str] = field(default_factory=list)  # the tokens that merges make

    @classmethod
    def made(cls, seed: int = 0) -> BigLlama:
        words, merges = _vocabulary(random.Random(seed), VOCABULARY - 256 - CONTROL)
        return cls(words=words, merges=merges, seed=seed)

    def tokens(self) -> list[str]:
        return [*byte_characters(), *self.words, *self.control]

    def write(self, path: Path) -> Path:
        """Front to back; only a piece of one tensor is in memory."""
        planned, offset = list(self._plan()), 0
        rows = []
        for tensor in planned:
            rows.append(TensorBytes(tensor.name, tensor.dims, tensor.number, b"", offset))
            offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        generator = np.random.default_rng(self.seed)
        with path.open("wb") as file:
            file.write(gguf_bytes(self.metadata(), rows, alignment=ALIGNMENT))
            for tensor in planned:
                for piece in _pieces(generator, tensor):
                    file.write(piece)
                file.write(bytes(-tensor.nbytes % ALIGNMENT))
        return path

    def _plan(self) -> Iterator[_Planned]:
        kv_width = self.width // self.heads * self.kv_heads
        yield _Planned("rope_freqs.weight", (self.width // self.heads // 2,), "rope")
        yield _Planned("token_embd.weight", (self.width, VOCABULARY), "Q6_K")
        for block in range(self.blocks):
            finer = "Q6_K" if _has_more_bits(block, self.blocks) else "Q4_K"
            for name, dims, kind in (
                ("attn_norm", (self.width,), "norm"),
                ("ffn_down", (self.feed_forward, self.width), finer),
                ("ffn_gate", (self.width, self.feed_forward), "Q4_K"),
                ("ffn_up", (self.width, self.feed_forward), "Q4_K"),
                ("ffn_norm", (self.width,), "norm"),
                ("attn_k", (self.width, kv_width), "Q4_K"),
                ("attn_output", (self.width, self.width), "Q4_K"),
                ("attn_q", (self.width, self.width), "Q4_K"),
                ("attn_v", (self.width, kv_width), finer),
            ):
                yield _Planned(f"blk.{block}.{name}.weight", dims, kind)
        yield _Planned("output_norm.weight", (self.width,), "norm")


def _has_more_bits(block: int, blocks: int) -> bool:
    """llama.cpp, use_more_bits: which blocks Q4_K_M gives Q6_K for attn_v and ffn_down."""
    eighth = blocks // 8
    return block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2


def _pieces(generator: np.random.Generator, tensor: _Planned) -> Iterator[bytes]:
    if tensor.kind == "rope":
        yield _rope_factors(2 * tensor.dims[0]).astype("<f4").tobytes()
        return
    if len(tensor.dims) == 1:
        yield random_tensor(generator, tensor.name, tensor.dims, tensor.kind).data
        return
    inner, rows = tensor.dims
    for start in range(0, rows, PIECE_ROWS):
        dims = (inner, min(PIECE_ROWS, rows - start))
        yield random_tensor(generator, tensor.name, dims, tensor.kind).data


def _rope_factors(head_dim: int, *, base: float = 500_000.0, factor: float = 32.0) -> np.ndarray:
    """Llama 3.2's rope_freqs: waves longer than the old context are stretched, those in between partly."""
    old_context, low, high = 8192, 1.0, 4.0
    waves = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((old_context / waves - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _vocabulary(chance: random.Random, words: int) -> tuple[list[str], list[str]]:
    """So many words, each two earlier ones joined, and their merges: as in a real table, some words come of several
    pairs (Llama 3 has 280,147 merges; here they are half as many)."""
    known = list(byte_characters())
    seen, pairs = set(known), []
    while len(known) < words + 256:
        # Short words are joined more often, as in a real table; printable ASCII begins the alphabet.
        left, right = (known[int(len(known) * chance.random() ** 3)] for _ in range(2))
        if (word := left + right) not in seen and len(word) <= 16:
            known.append(word)
            seen.add(word)
            pairs.append(f"{left} {right}")
    made = set(pairs)
    for word in known[256:]:
        for at in range(1, len(word)):
            pair = f"{word[:at]} {word[at:]}"
            if pair not in made and word[:at] in seen and word[at:] in seen:
                pairs.append(pair)
    return known[256:], pairs
