"""Independent pieces of work, some at a time, each in a process of its own; their results in order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")


def in_order(work: Callable[[T], R], items: Sequence[T], *, jobs: int) -> Iterator[R]:
    """work(item) for each item, `jobs` at a time; a result is yielded once all before it have been."""
    if jobs <= 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, items)
