"""Quantised blocks to float32, bit for bit as the reference reader (gguf-py) does it, in numpy.

Formats: ggml's block structs (ggml-common.h) in little-endian bytes. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ppsmoke.errors import GgufError

# Weights worked on at once: source, nibbles and result stay in a core's cache (measured: 300 million weights a second).
CHUNK_WEIGHTS = 1 << 17

Blocks = np.ndarray  # (blocks, bytes a block), uint8
Weights = np.ndarray  # (blocks, weights a block), float32


def dequantise(raw: bytes | bytearray | memoryview | np.ndarray, type: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor's values as a fresh, writable float32 array of `shape` (rows, cols).

    Raises GgufError if the type is none of BLOCKS or the byte count does not fit the shape.
    """
    if type not in BLOCKS:
        raise GgufError(f"cannot dequantise {type}", hint=f"known types: {', '.join(BLOCKS)}")
    weights, block_bytes, unpack = BLOCKS[type]
    data = raw.reshape(-1).view(np.uint8) if isinstance(raw, np.ndarray) else np.frombuffer(raw, np.uint8)
    count = math.prod(shape)
    if count % weights or data.size != count // weights * block_bytes:
        raise GgufError(f"{data.size} bytes are no {type} tensor of shape {tuple(shape)}")
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((len(blocks), weights), np.float32)
    step = CHUNK_WEIGHTS // weights
    with np.errstate(all="ignore"):  # an infinite scale in a damaged file gives NaN, as in the reference; no warning
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _half(blocks: Blocks, at: int) -> np.ndarray:
    """The 16-bit float at byte `at` of each block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _f32(blocks: Blocks, out: Weights) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Blocks, out: Weights) -> None:
    out[:] = blocks.view("<f2")


def _q4_0(blocks: Blocks, out: Weights) -> None:
    d, qs = _half(blocks, 0), blocks[:, 2:]
    np.multiply((qs & 15).view(np.int8) - np.int8(8), d, out=out[:, :16])
    np.multiply((qs >> 4).view(np.int8) - np.int8(8), d, out=out[:, 16:])


def _q4_1(blocks: Blocks, out: Weights) -> None:
    d, m, qs = _half(blocks, 0), _half(blocks, 2), blocks[:, 4:]
    np.multiply(qs & 15, d, out=out[:, :16])
    np.multiply(qs >> 4, d, out=out[:, 16:])
    out += m


def _q8_0(blocks: Blocks, out: Weights) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_k(blocks: Blocks, out: Weights) -> None:
    """256 weights: 8 groups of 32 with 6-bit scales and minima, packed in 12 bytes (get_scale_min_k4)."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low_scales, low_minima, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low_scales & 63, (rest & 15) | ((low_scales >> 2) & 48)], axis=1)
    minima = np.concatenate([low_minima & 63, (rest >> 4) | ((low_minima >> 2) & 48)], axis=1)
    d = (_half(blocks, 0) * scales).reshape(-1, 4, 2, 1)
    m = (_half(blocks, 2) * minima).reshape(-1, 4, 2, 1)
    qs = blocks[:, 16:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 4, 2, 32)
    np.multiply(qs & 15, d[:, :, 0], out=groups[:, :, 0])
    np.multiply(qs >> 4, d[:, :, 1], out=groups[:, :, 1])
    groups -= m


def _q6_k(blocks: Blocks, out: Weights) -> None:
    """256 weights in two halves of four groups of 32: 4 low bits in ql, 2 high bits in qh, a scale for every 16."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    d = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8)).reshape(-1, 2, 4, 2, 1)
    groups = out.reshape(-1, 2, 4, 2, 16)
    for group in range(4):
        nibbles = low[:, :, group % 2] & 15 if group < 2 else low[:, :, group % 2] >> 4
        q = (nibbles | ((high >> (2 * group)) & 3) << 4).view(np.int8) - np.int8(32)
        np.multiply(q.reshape(-1, 2, 2, 16), d[:, :, group], out=groups[:, :, group])


# type: (weights a block, bytes a block, how to unpack it)
BLOCKS: dict[str, tuple[int, int, Callable[[Blocks, Weights], None]]] = {
    "F32": (1, 4, _f32),
    "F16": (1, 2, _f16),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q6_K": (256, 210, _q6_k),
}
