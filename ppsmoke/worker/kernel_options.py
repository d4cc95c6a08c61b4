"""Explicit options for the few kernels whose speed decides a stage's speed: products of a weight matrix and a vector.

The only place that touches tinygrad.codegen.opt. Every answer may be (): the plain kernel, right and slower.
"""

from __future__ import annotations

from typing import Any

try:
    from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
except ImportError:  # another tinygrad: plain kernels

    class KernelOptError(Exception):  # type: ignore[no-redef]
        """Never raised: no options are given."""

    Opt = OptOps = None  # type: ignore[assignment,misc]

LANES = 16  # rows of a matrix that lie side by side in memory: one AVX-512 register of float32, two of AVX2
GPU_GROUPS = (128, 64, 32, 16, 8)  # threads that share one row's sum; measured best: the largest that divides


_enabled = Opt is not None


def disable() -> None:
    """Plain kernels from now on: a device or a shape refused an option."""
    global _enabled
    _enabled = False


def packed_product(groups: int, inner: int, tokens: int) -> tuple[Any, ...]:
    """For a (groups, tokens, LANES) result summed over `inner`, weights packed (groups, inner, LANES): CPU.

    The lanes become vector registers; a few token rows or row groups beside them share each load.
    """
    if tokens == 1:  # axes: groups, lanes
        side = _largest((4, 3, 2), groups)
        return _options(("UPCAST", 1, LANES), ("UPCAST", 0, side), ("UNROLL", 0, _largest((4, 2), inner)))
    # axes: groups, tokens, lanes
    return _options(
        ("UPCAST", 2, LANES), ("UPCAST", 1, _largest((8, 4, 2), tokens)), ("UNROLL", 0, _largest((4, 2), inner))
    )


def row_product(inner: int) -> tuple[Any, ...]:
    """For a vector of sums over `inner`, weights in rows as stored: GPU. Many threads share a row."""
    group = _largest(GPU_GROUPS, inner // 4) if inner % 4 == 0 else 1
    return _options(("GROUP", 0, group), ("UNROLL", 0, 4)) if group > 1 else ()


def _largest(choices: tuple[int, ...], size: int) -> int:
    return next((choice for choice in choices if size % choice == 0), 1)


def _options(*named: tuple[str, int, int]) -> tuple[Any, ...]:
    if not _enabled:
        return ()
    return tuple(Opt(getattr(OptOps, name), axis, amount) for name, axis, amount in named if amount > 1)
