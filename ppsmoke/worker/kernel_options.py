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

    The lanes become vector registers; a few tokens or groups beside them share each load.
    """
    return _options(*_lanes_and_side(groups, tokens), ("UNROLL", 0, _largest((4, 2), inner)))


def gated_product(groups: int, inner: int, tokens: int) -> tuple[Any, ...]:
    """Like packed_product(), for two such sums in one kernel."""
    unroll = _largest((4, 2), inner)
    return _options(*_lanes_and_side(groups, tokens), ("UNROLL", 0, unroll), ("UNROLL", 1, unroll))


def _lanes_and_side(groups: int, tokens: int) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    """Axes are groups, tokens, lanes; an axis of one is none. Four beside the lanes: more spills registers."""
    if tokens == 1:
        return ("UPCAST", 1, LANES), ("UPCAST", 0, _largest((4, 3, 2), groups))
    return ("UPCAST", 2, LANES), ("UPCAST", 1, _largest((4, 2), tokens))


def shared_heads(share: int, axis: int) -> tuple[Any, ...]:
    """For attention's (kv_heads, share, ..., vector) results: the vector axis in registers, heads that share a key
    head beside it."""
    return _options(("UPCAST", axis, LANES), ("UPCAST", 1, _largest((4, 3, 2), share)))


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
