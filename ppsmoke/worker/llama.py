"""A Llama's shape and one of its blocks, on tinygrad's public API. Knows nothing of files, stages or caches on disk.

The block works on (tokens, dim) float32 activations; weights are float32 or float16, sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from ppsmoke.errors import GgufError
from ppsmoke.worker import kernel_options
from ppsmoke.worker.gguf import Gguf


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The numbers of a Llama; rope_scale divides every rotary frequency (1 but for linear scaling)."""

    blocks: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_base: float
    rope_scale: float
    context: int
    vocabulary: int
    tied: bool

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> LlamaConfig:
        """Raises GgufError for what this block would compute wrongly, and for tensors that are missing or misshapen."""
        if "token_embd.weight" not in gguf.tensors:
            raise GgufError(f"{gguf.name}: the tensor token_embd.weight is missing", hint="the file is no whole model")
        dim, heads = gguf.integer("llama.embedding_length"), gguf.integer("llama.attention.head_count")
        head_dim = gguf.integer("llama.attention.key_length", max(1, dim // heads))
        config = cls(
            blocks=gguf.integer("llama.block_count"),
            dim=dim,
            heads=heads,
            kv_heads=gguf.integer("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_dim=gguf.integer("llama.feed_forward_length"),
            norm_eps=gguf.number("llama.attention.layer_norm_rms_epsilon"),
            rope_base=gguf.number("llama.rope.freq_base", 10000.0),
            rope_scale=_rope_scale(gguf),
            context=gguf.integer("llama.context_length"),
            vocabulary=gguf.tensors["token_embd.weight"].shape[0],
            tied="output.weight" not in gguf.tensors,
        )
        _refuse_what_we_compute_wrongly(gguf, config)
        return config

    def shape(self) -> dict[str, int | float]:
        """What a compiled step depends on: no number of blocks or context, no rotary base."""
        return {
            "dim": self.dim,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ffn_dim": self.ffn_dim,
            "norm_eps": self.norm_eps,
            "vocabulary": self.vocabulary,
        }

    def tensor_shapes(self, block: int) -> dict[str, tuple[int, ...]]:
        """The shapes (rows, cols) of one block's tensors by their name in the file."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.dim,),
            "attn_q": (q, self.dim),
            "attn_k": (kv, self.dim),
            "attn_v": (kv, self.dim),
            "attn_output": (self.dim, q),
            "ffn_norm": (self.dim,),
            "ffn_gate": (self.ffn_dim, self.dim),
            "ffn_up": (self.ffn_dim, self.dim),
            "ffn_down": (self.dim, self.ffn_dim),
        }
        return {f"blk.{block}.{name}.weight": shape for name, shape in shapes.items()}


def layer_range(total: int, stage: int, num_stages: int) -> tuple[int, int]:
    """The blocks [from, to) of a stage: total // N each, the remainder to the last. Spec, section 4, "Loading"."""
    k = total // num_stages
    return stage * k, (stage + 1) * k if stage < num_stages - 1 else total


def rope_tables(config: LlamaConfig, divisors: np.ndarray | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (length, head_dim / 2), float32 of angles in float64.

    divisors: rope_freqs.weight, by which llama.cpp divides each frequency (Llama 3.1 and later), None without it.
    """
    frequencies = config.rope_base ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    frequencies /= config.rope_scale
    if divisors is not None:
        frequencies /= divisors.astype(np.float64)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def half_split_rows(weights: np.ndarray, head_dim: int) -> np.ndarray:
    """q's or k's rows from llama.cpp's rotary layout (pairs are neighbours) to halves (a pair is i and i + half).

    The same dot products in another order of rows: exact, and q and k are permuted alike, so attention is the same.
    """
    pairs = weights.reshape(-1, head_dim // 2, 2, weights.shape[-1])
    return pairs.transpose(0, 2, 1, 3).reshape(weights.shape)


@dataclass(frozen=True)
class Shared:
    """What all blocks of a stage read: rotary tables (length, head_dim / 2) and the positions 0..length-1."""

    cosines: Tensor
    sines: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Block:
    """One block's tensors on the device, in the order in which run_block takes them.

    qkv and gate_up are matrices stacked by rows. kv is the cache: (2, kv_heads, length, head_dim).
    """

    attn_norm: Tensor
    qkv: Tensor
    attn_output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    ffn_down: Tensor
    kv: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.attn_norm,
            self.qkv,
            self.attn_output,
            self.ffn_norm,
            self.gate_up,
            self.ffn_down,
            self.kv,
        )


TENSORS_PER_BLOCK = 7


def run_block(x: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """One block on (tokens, dim), same shape out; its keys and values are written to the cache from `position` on."""
    attended = _attend(rms_norm(x, block.attn_norm, config), block, shared, config, position)
    x = (x + multiply(attended, block.attn_output)).contiguous()
    gate_up = multiply(rms_norm(x, block.ffn_norm, config), block.gate_up)
    gate, up = gate_up[:, : config.ffn_dim], gate_up[:, config.ffn_dim :]
    return x + multiply((gate.silu() * up).contiguous(), block.ffn_down)


def rms_norm(x: Tensor, weight: Tensor, config: LlamaConfig) -> Tensor:
    return (x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weight).contiguous()


def multiply(x: Tensor, weights: Tensor) -> Tensor:
    """(tokens, inner) times the transposed matrix: (tokens, rows). Weights as packed by `weights.py`, or in rows."""
    tokens, inner = x.shape
    if len(weights.shape) == 3:  # (groups, inner, lanes)
        groups, _, lanes = weights.shape
        if tokens == 1:
            product = (weights.cast(dtypes.float32) * x.reshape(1, inner, 1)).sum(1)
        else:
            product = (
                weights.cast(dtypes.float32).reshape(groups, 1, inner, lanes) * x.reshape(1, tokens, inner, 1)
            ).sum(2)
        options = kernel_options.packed_product(groups, inner, tokens)
        product = _computed(product, options).reshape(groups, tokens, lanes)
        return product.permute(1, 0, 2).reshape(tokens, groups * lanes)
    if tokens == 1:
        product = (weights.cast(dtypes.float32) * x).sum(-1)
        options = () if weights.dtype == dtypes.float32 else kernel_options.row_product(inner)
        return _computed(product, options).reshape(1, -1)
    return x.cast(weights.dtype).matmul(weights.transpose(), dtype=dtypes.float32).contiguous()


def _computed(result: Tensor, options: tuple) -> Tensor:
    return result.contiguous(arg=options) if options else result.contiguous()


def _attend(x: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """Causal attention of normed (tokens, dim) over the cache and themselves: (tokens, heads * head_dim)."""
    tokens, kv_heads, head_dim = x.shape[0], config.kv_heads, config.head_dim
    queries_end = config.heads * head_dim
    projected = multiply(x, block.qkv)

    def by_head(start: int, heads: int) -> Tensor:  # (heads, tokens, head_dim)
        return projected[:, start : start + heads * head_dim].reshape(tokens, heads, head_dim).transpose(0, 1)

    cosines, sines = (
        table[position : position + tokens].reshape(1, tokens, -1) for table in (shared.cosines, shared.sines)
    )
    queries = _rotate(by_head(0, config.heads), cosines, sines)
    keys = _rotate(by_head(queries_end, kv_heads), cosines, sines)
    values = by_head(queries_end + kv_heads * head_dim, kv_heads)
    cache = block.kv
    cache[:, :, position : position + tokens, :].assign(Tensor.stack(keys, values).cast(cache.dtype)).realize()
    keys, values = (cache[which, :, : position + tokens].cast(dtypes.float32) for which in (0, 1))

    # Heads that share keys stand together: (kv_heads, heads / kv_heads, tokens, head_dim).
    queries = (queries * (1 / math.sqrt(head_dim))).reshape(kv_heads, -1, tokens, head_dim).contiguous()
    scores = queries @ keys.unsqueeze(1).transpose(2, 3)
    if tokens > 1:
        ours = shared.positions[position : position + tokens].reshape(tokens, 1)
        theirs = shared.positions[: position + tokens].reshape(1, position + tokens)
        scores = (theirs <= ours).where(scores, -math.inf)
    attended = scores.softmax(-1) @ values.unsqueeze(1)
    return attended.reshape(config.heads, tokens, head_dim).transpose(0, 1).reshape(tokens, -1).contiguous()


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return (first * cosines - second * sines).cat(second * cosines + first * sines, dim=-1)


def _rope_scale(gguf: Gguf) -> float:
    kind = gguf.text("llama.rope.scaling.type", "none")
    if kind == "linear":
        return gguf.number("llama.rope.scaling.factor")
    if kind != "none":
        raise GgufError(
            f"{gguf.name}: rotary scaling {kind[:40]!r} is not known", hint="known: none, linear, rope_freqs"
        )
    return 1.0


def _refuse_what_we_compute_wrongly(gguf: Gguf, config: LlamaConfig) -> None:
    def refuse(cause: str, hint: str = "") -> GgufError:
        return GgufError(f"{gguf.name}: {cause}", hint=hint)

    if config.heads % config.kv_heads or config.head_dim % 2:
        raise refuse(f"{config.heads} heads over {config.kv_heads} key heads of {config.head_dim} do not divide")
    if gguf.integer("llama.rope.dimension_count", config.head_dim) != config.head_dim:
        raise refuse("only a part of each head is rotated; this is not built")
    if gguf.integer("llama.attention.value_length", config.head_dim) != config.head_dim:
        raise refuse("values and keys have heads of different widths; this is not built")
    if gguf.integer("llama.expert_count", 0, low=0) > 0:
        raise refuse("this is a mixture of experts; only dense models are built")
    wanted = {
        "token_embd.weight": (config.vocabulary, config.dim),
        "output_norm.weight": (config.dim,),
        **({} if config.tied else {"output.weight": (config.vocabulary, config.dim)}),
    }
    for block in range(config.blocks):
        wanted |= config.tensor_shapes(block)
    if "rope_freqs.weight" in gguf.tensors:
        wanted["rope_freqs.weight"] = (config.head_dim // 2,)
    for name, shape in wanted.items():
        if name not in gguf.tensors:
            raise refuse(f"the tensor {name} is missing", hint="the file is no whole model")
        if gguf.tensors[name].shape != shape:
            raise refuse(f"{name} has the shape {gguf.tensors[name].shape}, not {shape}")
    for name in gguf.tensors:
        if name.startswith("blk.") and name not in wanted:
            raise refuse(f"the tensor {name[:64]} is no part of a Llama that is built")
