"""From valid bytes to hostile ones. The same generator in the same state gives the same bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

MAX_BYTES = 1 << 16  # of a mutated input
_EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63, 2**64 - 1)
_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**64, 10**400, 1e308, -0.0, float("nan"), float("inf"), "", "x", "\0",
    "\ud800", "a" * 5000, [], [[]], {}, {"": None}, [None] * 50, "NaN", "1",
)  # fmt: skip


def mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of the corpus with a few changes; now and then none, so that a decoder's good path is taken as well."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 4, 8))):
        _CHANGES[rng.getrandbits(4) % len(_CHANGES)](rng, data, corpus)
    return bytes(data[:MAX_BYTES])


def mutated_json(rng: random.Random, corpus: Sequence[Any]) -> str:
    """The text of a JSON value in which a few places hold something else; or text that is none."""
    holder = [json.loads(json.dumps(rng.choice(corpus)))]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        _replace_somewhere(rng, holder)
    text = json.dumps(holder[0])
    dice = rng.random()
    if dice < 0.02:
        return rng.choice(("[", '{"a":', "[[]," * 10)) * rng.choice((10, 1000, 20_000))
    if dice < 0.2:
        return mutated(rng, [text.encode()]).decode("utf-8", "replace")
    return text


def _replace_somewhere(rng: random.Random, value: Any) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.85:
            value = value[key]
            continue
        if isinstance(value, dict) and rng.random() < 0.1:
            del value[key]
        else:
            value[key] = copy.deepcopy(rng.choice(_ODD_VALUES))
        return


def _flip(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.getrandbits(3)


def _set(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.getrandbits(8)


def _edge(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A number at the border of its type, where lengths and counts may stand."""
    size = rng.choice((1, 2, 4, 8))
    if len(data) >= size:
        at = rng.randrange(len(data) - size + 1)
        value = (rng.choice(_EDGES) + rng.choice((0, 0, 1, -1))) & ((1 << 8 * size) - 1)
        data[at : at + size] = value.to_bytes(size, rng.choice(("big", "little")))


def _nudge(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """One more or less: lengths that are wrong by one."""
    if data:
        at = rng.randrange(len(data))
        data[at] = (data[at] + rng.choice((1, -1))) & 0xFF


def _truncate(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _extend(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    data += rng.randbytes(rng.choice((1, 2, 7, 64, 1500)))


def _insert(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 20))


def _delete(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randrange(1, 20)]


def _repeat(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A part of it, many times."""
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.randrange(1, 64)] * rng.choice((1, 1, 2, 5, 40))


def _splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """The start of this, the end of another."""
    other = rng.choice(corpus)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _zero(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + 8] = bytes(len(data[at : at + 8]))


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip, _set, _edge, _nudge, _truncate, _extend, _insert, _delete, _repeat, _splice, _zero, _flip, _edge,
)  # fmt: skip
