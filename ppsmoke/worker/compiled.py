"""Compiled steps and the copies around them, with as little Python per token as tinygrad's TinyJit allows.

The short cuts use TinyJit's and Buffer's insides; each checks that they are as expected and else takes the public way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp

from ppsmoke.worker.kernel_store import KernelStore


class Compiled:
    """A function of tensors (and a position), compiled once and then called with any tensors of the same shapes.

    A captured graph does not check its variable: whoever calls must keep 0 <= position <= limit.
    what: describes function and shapes for the store. bound: all later calls have the tensors of the warm-up, which
    lets a GPU's graph be launched without updating its nodes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        position_limit: int | None = None,
        store: KernelStore,
        what: dict[str, Any],
        bound: bool = False,
    ) -> None:
        self._function = function
        self._position_limit = position_limit
        # One variable per compiled function: another range under the same name would run past the cache silently.
        self._variable = None if position_limit is None else UOp.variable("position", 0, position_limit)
        self._store, self._what, self._bound = store, what, bound
        self._is_bound = False
        self._jit = self._new_jit()

    def _new_jit(self) -> Any:
        jit = TinyJit(self._function)
        if getattr(jit, "cnt", None) == 0:
            jit.cnt = 1  # capture in the first call: the uncaptured run before it would only cost time
        return jit

    def warm_up(self, *tensors: Tensor) -> None:
        """Compile everything, or read it from the store; run it until no call does anything for the first time."""
        # What was compiled fits these shapes alone, whatever the caller's description leaves out.
        self._what = self._what | {"tensors": [[*tensor.shape, tensor.dtype.name] for tensor in tensors]}
        with self._store.alone(self._what):
            self._load_or_capture(tensors)

    def _load_or_capture(self, tensors: tuple[Tensor, ...]) -> None:
        if (stored := self._store.load(self._what)) is not None:
            self._jit = stored
            try:
                self._first_runs(tensors)
                return
            except Exception as error:  # stored by another state of things than its description says
                print(f"a stored step does not run and is compiled anew: {error!r:.200}", file=sys.stderr)
                self._store.forget(self._what)
                self._jit, self._is_bound = self._new_jit(), False
        for _ in range(2):
            self(*tensors)
            if getattr(self._jit, "captured", None) is not None:
                break
        if getattr(self._jit, "captured", None) is not None:
            self._store.save(self._what, self._jit)
        self._first_runs(tensors)

    def _first_runs(self, tensors: tuple[Tensor, ...]) -> None:
        captured = getattr(self._jit, "captured", None)
        buffers = [_buffer(tensor) for tensor in tensors]
        if self._bound and captured is not None and None not in buffers and not captured.extra_view_inputs:
            for (item, slot), index in captured._input_replace.items():
                captured._jit_cache[item].bufs[slot] = buffers[index]
            captured._input_replace.clear()
            self._is_bound = True
        for _ in range(2):
            self(*tensors)

    def __call__(self, *tensors: Tensor, position: int = 0) -> Any:
        if self._position_limit is not None and not 0 <= position <= self._position_limit:
            raise ValueError(f"position {position} is outside 0..{self._position_limit}")
        captured = getattr(self._jit, "captured", None)
        if captured is not None:
            values = {} if self._variable is None else {"position": position}
            buffers = [] if self._is_bound else [_buffer(tensor) for tensor in tensors]
            if None not in buffers:
                return captured(buffers, values)
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
