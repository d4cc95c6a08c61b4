"""Hidden states as bytes on the wire: little-endian bfloat16, float16 or float32, converted on the host in numpy.

On the host, because CUDA's PTX renderer in tinygrad has no bfloat16. Knows nothing of models.
"""

from __future__ import annotations

import numpy as np

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIRE_DTYPES = tuple(ITEM_BYTES)
FLOAT16_MAX = np.float32(65504.0)  # the largest finite half; beyond it a cast gives inf, and inf - inf a NaN later


def to_wire(hidden: np.ndarray, dtype: str) -> bytes:
    """The float32 values as bytes of `dtype`, rounded to nearest even; float16 is clipped to its finite range.

    Raises ValueError for a dtype that is none of WIRE_DTYPES.
    """
    values = np.ascontiguousarray(hidden, np.float32)
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "bfloat16":
        return _to_bfloat16(values).astype("<u2", copy=False).tobytes()
    if dtype == "float16":
        return np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype("<f2").tobytes()
    raise ValueError(f"unknown wire dtype {dtype!r}; known: {', '.join(WIRE_DTYPES)}")


def from_wire(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes as a fresh, writable float32 array of `shape`.

    Raises ValueError for an unknown dtype or a byte count that does not fit the shape.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown wire dtype {dtype!r}; known: {', '.join(WIRE_DTYPES)}")
    wanted = int(np.prod(shape)) * ITEM_BYTES[dtype]
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes are no {dtype} of shape {shape}, which takes {wanted}")
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    # A copy: a view of bytes is read-only, and CUDA cannot upload one.
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2").astype(np.float32).reshape(shape)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of the float32 words, rounded to nearest even; NaN stays a (quiet) NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding would carry a full mantissa into the sign
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
