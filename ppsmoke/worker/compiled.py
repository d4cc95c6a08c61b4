"""Compiled steps and the copies around them, with as little Python per token as tinygrad's TinyJit allows.

The short cuts use TinyJit's and Buffer's insides; each checks that they are as expected and else takes the public way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp


class Compiled:
    """A function of tensors (and a position), compiled once and then called with any tensors of the same shapes.

    A captured graph does not check its variable: whoever calls must keep 0 <= position <= limit.
    """

    def __init__(self, function: Callable[..., Any], *, position_limit: int | None = None) -> None:
        self.position_limit = position_limit
        # One variable per compiled function: another range under the same name would run past the cache silently.
        self._variable = None if position_limit is None else UOp.variable("position", 0, position_limit)
        self._jit = TinyJit(function)
        if getattr(self._jit, "cnt", None) == 0:
            self._jit.cnt = 1  # capture in the first call: the uncaptured run before it would only cost time

    def warm_up(self, *tensors: Tensor) -> None:
        """Compile everything: capture, then the first run of what was captured."""
        for _ in range(3):
            self(*tensors, position=0)
            if getattr(self._jit, "captured", None) is not None and not self._jit.captured._first_run:
                break

    def __call__(self, *tensors: Tensor, position: int = 0) -> Any:
        if self.position_limit is not None and not 0 <= position <= self.position_limit:
            raise ValueError(f"position {position} is outside 0..{self.position_limit}")
        captured = getattr(self._jit, "captured", None)
        buffers = [_buffer(tensor) for tensor in tensors] if captured is not None else []
        if captured is not None and None not in buffers:
            return captured(buffers, {} if self._variable is None else {"position": position})
        if self._variable is None:
            return self._jit(*tensors)
        return self._jit(*tensors, self._variable.bind(position))


def copy_in(tensor: Tensor, values: np.ndarray) -> None:
    """Overwrite a realized tensor with values of its shape and dtype."""
    values = np.ascontiguousarray(values)
    buffer = _buffer(tensor)
    if buffer is None:
        tensor.assign(Tensor(values, device=tensor.device)).realize()
        return
    buffer.copyin(memoryview(values).cast("B"))


def copy_out(tensor: Tensor) -> np.ndarray:
    """A fresh array of a realized tensor's values. Waits until they are computed."""
    buffer = _buffer(tensor)
    dtype = _NUMPY_DTYPES.get(tensor.dtype.name)
    if buffer is None or dtype is None:
        return tensor.numpy()
    values = np.empty(tensor.shape, dtype)
    buffer.copyout(memoryview(values).cast("B"))
    return values


_NUMPY_DTYPES = {"float": np.float32, "int": np.int32}


def _buffer(tensor: Tensor) -> Any:
    """The whole buffer behind a realized tensor, or None where tinygrad does not show it as 0.12 does."""
    base = getattr(tensor.uop, "base", None)
    buffer = getattr(base, "realized", None)
    return buffer if hasattr(buffer, "copyin") and hasattr(buffer, "copyout") else None
