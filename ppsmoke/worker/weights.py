"""A stage's tensors from the file onto the device, one at a time: read, dequantise, lay out, upload.

On the CPU tinygrad computes on our own memory (no copy); matrices are packed LANES rows side by side there.
Knows the layouts, not the arithmetic.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from ppsmoke.worker.dequant import dequantise
from ppsmoke.worker.gguf import ByteSource, Gguf, TensorInfo
from ppsmoke.worker.kernel_options import LANES
from ppsmoke.worker.llama import Block, LlamaConfig, half_split_rows

SLAB_WEIGHTS = 1 << 16  # 256 KiB of float32
Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


class Rows:
    """A matrix as stored, made floats by slabs of rows that stay in a core's cache until they are laid out.

    head_dim: the rows are queries or keys, whose rotary layout is changed (half_split_rows).
    """

    def __init__(self, raw: bytes, info: TensorInfo, *, head_dim: int | None = None) -> None:
        self.count, self.inner = info.shape
        self._type, self._head_dim = info.type, head_dim
        self._rows = np.frombuffer(raw, np.uint8).reshape(self.count, -1)
        step = math.lcm(LANES, head_dim or LANES)
        self.slab = step * max(1, SLAB_WEIGHTS // (step * self.inner))

    def floats(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in float32; start is a multiple of `slab`."""
        floats = dequantise(self._rows[start:stop], self._type, (stop - start, self.inner))
        return floats if self._head_dim is None else half_split_rows(floats, self._head_dim)


class Placement:
    """Makes tensors on one device and keeps alive what they point into."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_cpu = device.startswith("CPU")
        self.weight_dtype = "float32" if self.on_cpu else "float16"
        self.weight_bytes = 0
        self._mapped: list[mmap.mmap] = []

    def matrix(self, parts: Sequence[Rows]) -> Tensor:
        """Matrices (rows, inner) stacked by rows, laid out for this device."""
        if (packed := self.packed(parts)) is not None:
            return self.packed_matrix(packed)
        stacked = np.concatenate([part.floats(0, part.count) for part in parts])
        if self.on_cpu:
            return self._weights(self._adopt(stacked))
        return self._weights(Tensor(stacked.astype(np.float16), device=self.device).realize())

    def packed(self, parts: Sequence[Rows]) -> np.ndarray | None:
        """The stacked matrices as (rows / LANES, inner, LANES), or None where this device or these rows want none."""
        if not self.on_cpu or any(part.count % LANES for part in parts):
            return None
        inner = parts[0].inner
        packed = self._zeros((sum(part.count for part in parts) // LANES, inner, LANES))
        done = 0
        for part in parts:
            for start in range(0, part.count, part.slab):
                floats = part.floats(start, min(start + part.slab, part.count))
                groups = len(floats) // LANES
                packed[done : done + groups] = floats.reshape(groups, LANES, inner).transpose(0, 2, 1)
                done += groups
        return packed

    def packed_matrix(self, packed: np.ndarray) -> Tensor:
        """The tensor over what packed() returned."""
        return self._weights(self._view(packed))

    def vector(self, values: np.ndarray) -> Tensor:
        """A norm's weights: float32 everywhere."""
        return self._weights(self.table(values.astype(np.float32, copy=False)))

    def table(self, values: np.ndarray) -> Tensor:
        """A table that is not part of the model, in its own dtype."""
        return self._adopt(values) if self.on_cpu else Tensor(values.copy(), device=self.device).realize()

    def zeros(self, shape: tuple[int, ...], *, dtype: str = "float32") -> Tensor:
        """Zeros to be overwritten. On the CPU, memory that is not touched is not taken."""
        if self.on_cpu:
            return self._view(self._zeros(shape, np.dtype(dtype).type))
        return Tensor.zeros(*shape, dtype=getattr(dtypes, dtype), device=self.device).contiguous().realize()

    def _weights(self, tensor: Tensor) -> Tensor:
        self.weight_bytes += tensor.nbytes()
        return tensor

    def _zeros(self, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """Zeroed memory that begins at a page: kernels load whole vector registers and want them aligned."""
        count = int(np.prod(shape))
        memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
        self._mapped.append(memory)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def _adopt(self, values: np.ndarray) -> Tensor:
        ours = self._zeros(values.shape, values.dtype.type)
        ours[...] = values
        return self._view(ours)

    def _view(self, array: np.ndarray) -> Tensor:
        dtype = {"float32": dtypes.float32, "int32": dtypes.int32}[array.dtype.name]
        return Tensor.from_blob(array.ctypes.data, array.shape, dtype=dtype, device=self.device)


class Embedding:
    """The embedding as stored in the file; a lookup dequantises a token's row. Takes no device memory."""

    def __init__(self, raw: bytes, info: TensorInfo) -> None:
        self._type, self._dim = info.type, info.shape[1]
        self._rows = np.frombuffer(raw, np.uint8).reshape(info.shape[0], -1)
        self.nbytes = self._rows.nbytes

    def __call__(self, token_ids: Sequence[int]) -> np.ndarray:
        """(tokens, dim) float32."""
        return dequantise(np.ascontiguousarray(self._rows[list(token_ids)]), self._type, (len(token_ids), self._dim))


class PackedRows:
    """The embedding of a stage that has the whole model: the rows of its packed output matrix. No second copy."""

    nbytes = 0  # counted where the matrix was made

    def __init__(self, packed: np.ndarray) -> None:
        self._packed = packed

    def __call__(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = np.asarray(token_ids)
        return self._packed[ids // LANES, :, ids % LANES]


class Reader:
    """Reads this stage's tensors and says how far it is."""

    def __init__(self, source: ByteSource, gguf: Gguf, names: Sequence[str], progress: Progress) -> None:
        self._source, self._gguf, self._progress = source, gguf, progress
        self._total = sum(gguf.tensors[name].nbytes for name in names)
        self._done = 0
        source.prefetch((gguf.tensors[name].offset, gguf.tensors[name].nbytes) for name in names)

    def raw(self, name: str) -> bytes:
        info = self._gguf.tensors[name]
        data = self._source.read(info.offset, info.nbytes)
        self._done += info.nbytes
        return data

    def rows(self, name: str, *, head_dim: int | None = None) -> Rows:
        return Rows(self.raw(name), self._gguf.tensors[name], head_dim=head_dim)

    def floats(self, name: str) -> np.ndarray:
        info = self._gguf.tensors[name]
        return dequantise(self.raw(name), info.type, info.shape)

    def say(self, what: str) -> None:
        self._progress(what, self._done, self._total)


def stage_tensors(gguf: Gguf, config: LlamaConfig, blocks: tuple[int, int]) -> list[str]:
    """The names of the tensors that the stage with these blocks needs, and no other."""
    is_first, is_last = blocks[0] == 0, blocks[1] == config.blocks
    names = [name for block in range(*blocks) for name in config.tensor_shapes(block)]
    if is_last:
        names += ["output_norm.weight"] + ([] if config.tied else ["output.weight"])
    if is_first or (is_last and config.tied):
        names.append("token_embd.weight")
    if "rope_freqs.weight" in gguf.tensors:
        names.append("rope_freqs.weight")
    return names


def load_block(reader: Reader, place: Placement, config: LlamaConfig, block: int, *, cache_length: int) -> Block:
    """One block's tensors on the device, and its empty cache."""

    def matrix(*names: str) -> Tensor:
        rotated = ("attn_q", "attn_k")
        return place.matrix(
            [reader.rows(f"blk.{block}.{n}.weight", head_dim=config.head_dim if n in rotated else None) for n in names]
        )

    def vector(name: str) -> Tensor:
        return place.vector(reader.floats(f"blk.{block}.{name}.weight"))

    return Block(
        attn_norm=vector("attn_norm"),
        qkv=matrix("attn_q", "attn_k", "attn_v"),
        attn_output=matrix("attn_output"),
        ffn_norm=vector("ffn_norm"),
        gate_up=matrix("ffn_gate", "ffn_up"),
        ffn_down=matrix("ffn_down"),
        keys=place.zeros((config.kv_heads, config.head_dim, cache_length), dtype=place.weight_dtype),
        values=place.zeros((config.kv_heads, cache_length, config.head_dim), dtype=place.weight_dtype),
    )
