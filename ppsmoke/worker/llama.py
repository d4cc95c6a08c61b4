"""A Llama's shape and one of its blocks, on tinygrad's public API. Knows nothing of files, stages or caches on disk.

The block works on (tokens, dim) float32 activations; weights are float32 or float16, sums are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from ppsmoke.errors import GgufError
from ppsmoke.worker import kernel_options
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.kernel_options import LANES


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
    """One block's tensors on the device, in the order in which they are passed about.

    qkv and gate_up are matrices stacked by rows. The cache: keys (kv_heads, head_dim, length), so that many positions
    lie side by side, and values (kv_heads, length, head_dim).
    """

    attn_norm: Tensor
    qkv: Tensor
    attn_output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    ffn_down: Tensor
    keys: Tensor
    values: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def run_block(x: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """One block on (tokens, dim), same shape out; its keys and values are written to the cache from `position` on."""
    projected = multiply(rms_norm(x, block.attn_norm, config), block.qkv)
    if not _is_packed(block.qkv):
        attend = _attend_in_rows
    else:
        attend = _attend_one if x.shape[0] == 1 else _attend_many
    x = multiply(attend(projected, block, shared, config, position), block.attn_output, add=x)
    return multiply(_gated(rms_norm(x, block.ffn_norm, config), block.gate_up), block.ffn_down, add=x)


def rms_norm(x: Tensor, weight: Tensor, config: LlamaConfig) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt().contiguous()
    normed = x * scale * weight
    return normed if x.shape[0] == 1 else normed.contiguous()  # one row's is cheaper computed where it is read


def multiply(x: Tensor, weights: Tensor, *, add: Tensor | None = None) -> Tensor:
    """(tokens, inner) times the transposed matrix, plus `add`: (tokens, rows). Weights packed or in rows."""
    tokens, inner = x.shape
    if _is_packed(weights):
        product = _packed_product(x, weights)
        if add is not None:
            product = product + add.reshape(tokens, *product.shape[::2]).transpose(0, 1)
        return _from_groups(_computed(product, kernel_options.packed_product(weights.shape[0], inner, tokens)))
    if tokens > 1:
        product = x.cast(weights.dtype).matmul(weights.transpose(), dtype=dtypes.float32)
        return (product if add is None else product + add).contiguous()
    product = (weights.cast(dtypes.float32) * x).sum(-1).reshape(1, -1)
    options = () if weights.dtype == dtypes.float32 else kernel_options.row_product(inner)
    return _computed(product if add is None else product + add, options)


def _gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the two stacked matrices: (tokens, ffn_dim)."""
    tokens, inner = x.shape
    half = gate_up.shape[0] // 2
    if _is_packed(gate_up):  # both products in one kernel
        gate, up = _packed_product(x, gate_up[:half]), _packed_product(x, gate_up[half:])
        return _from_groups(_computed(gate.silu() * up, kernel_options.gated_product(half, inner, tokens)))
    both = multiply(x, gate_up)
    return (both[:, :half].silu() * both[:, half:]).contiguous()


def _is_packed(weights: Tensor) -> bool:
    return len(weights.shape) == 3  # (groups, inner, lanes): weights.py


def _packed_product(x: Tensor, weights: Tensor) -> Tensor:
    """(groups, tokens, lanes): groups outside, so that a group's weights stay near while all tokens pass."""
    (tokens, inner), (groups, _, lanes) = x.shape, weights.shape
    return (weights.reshape(groups, 1, inner, lanes) * x.reshape(1, tokens, inner, 1)).sum(2)


def _from_groups(product: Tensor) -> Tensor:
    groups, tokens, lanes = product.shape
    return product.transpose(0, 1).reshape(tokens, groups * lanes)


def _computed(result: Tensor, options: tuple) -> Tensor:
    return result.contiguous(arg=options) if options else result.contiguous()


def _attend_one(projected: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """Causal attention of one token over the cache and itself: (1, heads * head_dim).

    The cache is read in groups of LANES positions; what is beyond `position` in the last group counts as -inf.
    """
    kv_heads, head_dim, (share, options) = config.kv_heads, config.head_dim, _heads_of(block, config)
    queries = _cached(projected, block, shared, config, position).contiguous()
    groups, stored = position // LANES + 1, shared.positions.shape[0] // LANES
    keys = block.keys.reshape(kv_heads, 1, head_dim, stored, LANES)[:, :, :, :groups].permute(0, 1, 3, 4, 2)
    values = block.values.reshape(kv_heads, 1, stored, LANES, head_dim)[:, :, :groups]
    here = shared.positions.reshape(1, 1, stored, LANES)[:, :, :groups]
    seen = here <= shared.positions[position : position + 1].reshape(1, 1, 1, 1)

    scores = (queries.reshape(kv_heads, share, 1, 1, head_dim) * keys.cast(dtypes.float32)).sum(-1)
    scores = _computed(seen.where(scores, -math.inf), options(3))
    powers = (scores - scores.max((2, 3), keepdim=True)).exp().contiguous()
    sums = powers.sum((2, 3)).reshape(kv_heads, share, 1).contiguous()
    attended = (powers.reshape(kv_heads, share, groups, LANES, 1) * values.cast(dtypes.float32)).sum((2, 3))
    return _computed(attended / sums, options(2)).reshape(1, -1)


def _attend_many(projected: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """Causal attention of a chunk over the cache and itself: (tokens, heads * head_dim).

    Tokens lie innermost where keys are summed, head_dim where values are: there vectors are full.
    """
    kv_heads, head_dim, (share, options) = config.kv_heads, config.head_dim, _heads_of(block, config)
    tokens, end = projected.shape[0], position + projected.shape[0]
    queries = _cached(projected, block, shared, config, position)  # (heads, tokens, head_dim)
    queries = queries.reshape(kv_heads, share, 1, tokens, head_dim).transpose(3, 4).contiguous()
    keys = block.keys[:, :, :end].transpose(1, 2).reshape(kv_heads, 1, end, head_dim, 1)
    values = block.values[:, :end].reshape(kv_heads, 1, end, 1, head_dim)
    here = shared.positions[position:end].reshape(1, 1, 1, tokens)
    seen = shared.positions[:end].reshape(1, 1, end, 1) <= here

    scores = (queries * keys.cast(dtypes.float32)).sum(3)
    scores = _computed(seen.where(scores, -math.inf), options(3))
    powers = (scores - scores.max(2, keepdim=True)).exp().contiguous()
    sums = powers.sum(2).reshape(kv_heads, share, tokens, 1).contiguous()
    attended = (powers.reshape(kv_heads, share, end, tokens, 1) * values.cast(dtypes.float32)).sum(2)
    attended = _computed(attended / sums, options(3))
    return attended.reshape(config.heads, tokens, head_dim).transpose(0, 1).reshape(tokens, -1).contiguous()


def _attend_in_rows(projected: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """Causal attention of any number of tokens, in kernels of at most three axes: a GPU's grid has no more, and an axis
    as long as the context so far cannot be folded into another: (tokens, heads * head_dim)."""
    kv_heads, head_dim, share = config.kv_heads, config.head_dim, config.heads // config.kv_heads
    tokens, end = projected.shape[0], position + projected.shape[0]
    queries = _cached(projected, block, shared, config, position).contiguous()
    queries = queries.reshape(kv_heads, share * tokens, 1, head_dim)
    keys = block.keys[:, :, :end].transpose(1, 2).reshape(kv_heads, 1, end, head_dim)
    values = block.values[:, :end].reshape(kv_heads, 1, end, head_dim)
    here = shared.positions[position:end].reshape(1, tokens, 1).expand(share, tokens, 1)
    # A kernel of its own: read together with the keys, it would split heads and tokens into two more axes.
    seen = (shared.positions[:end].reshape(1, 1, end) <= here).contiguous().reshape(1, share * tokens, end)

    scores = seen.where((queries * keys.cast(dtypes.float32)).sum(-1), -math.inf).contiguous()
    powers = (scores - scores.max(2, keepdim=True)).exp().contiguous()
    sums = powers.sum(2).reshape(kv_heads, share * tokens, 1).contiguous()
    attended = (powers.reshape(kv_heads, share * tokens, end, 1) * values.cast(dtypes.float32)).sum(2)
    attended = (attended / sums).contiguous().reshape(config.heads, tokens, head_dim)
    return attended.transpose(0, 1).reshape(tokens, -1).contiguous()


def _heads_of(block: Block, config: LlamaConfig) -> tuple[int, Callable[[int], tuple]]:
    """How many heads share a key head, and the kernel options of a sum whose vector axis is the given one."""
    share = config.heads // config.kv_heads
    packed = _is_packed(block.qkv) and config.head_dim % LANES == 0
    return share, lambda axis: kernel_options.shared_heads(share, axis) if packed else ()


def _cached(projected: Tensor, block: Block, shared: Shared, config: LlamaConfig, position: UOp) -> Tensor:
    """Rotate queries and keys, put keys and values into the cache; the queries, scaled, (heads, tokens, head_dim)."""
    tokens, kv_heads, head_dim = projected.shape[0], config.kv_heads, config.head_dim
    end, queries_end = position + tokens, config.heads * head_dim

    def by_head(start: int, heads: int) -> Tensor:  # (heads, tokens, head_dim)
        return projected[:, start : start + heads * head_dim].reshape(tokens, heads, head_dim).transpose(0, 1)

    tables = (shared.cosines, shared.sines)
    cosines, sines = (table[position:end].reshape(1, tokens, -1) for table in tables)
    keys = _rotate(by_head(queries_end, kv_heads), cosines, sines).transpose(1, 2)
    values = by_head(queries_end + kv_heads * head_dim, kv_heads)
    block.keys[:, :, position:end].assign(keys.cast(block.keys.dtype)).realize()
    block.values[:, position:end].assign(values.cast(block.values.dtype)).realize()
    return _rotate(by_head(0, config.heads), cosines, sines) * (1 / math.sqrt(head_dim))


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
