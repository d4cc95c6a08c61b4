"""What is fuzzed, and what counts as a violation of it."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.lab.fuzz.mutate import mutated

BLOCK = 1000  # inputs that share a generator; a block is the least that can be run, wherever it runs
MAX_INPUT_S = 0.25  # of processor time
MAX_BASE_BYTES = 256 << 10  # that a decoder may allocate whatever came
MAX_MULTIPLE = 64  # and beyond it for each byte that came
KEPT_VIOLATIONS = 5
_VALUES = re.compile(r"""b?'.*'|".*"|[0-9a-f]{8,}|[0-9][0-9,]*""")
MAX_CAUSE_CHARS = 44


@dataclass(frozen=True)
class Target:
    """decode(data) returns for what it accepts, and raises one of `errors` for the rest; anything else is a violation,
    as is AssertionError: a decoder's own checks of what it did. generate: where mutated bytes of the corpus are not
    enough."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    corpus: Sequence[bytes] = ()
    generate: Callable[[random.Random], bytes] | None = None

    def input(self, rng: random.Random) -> bytes:
        return self.generate(rng) if self.generate is not None else mutated(rng, self.corpus)


@dataclass
class Outcome:
    """Of some blocks of one target; digest is the same whoever ran them in whatever order."""

    name: str
    inputs: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    worst_s: float = 0.0
    worst_bytes: int = 0
    violations: int = 0
    examples: list[str] = field(default_factory=list)
    digest: int = 0

    def add(self, other: Outcome) -> None:
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.refused += other.refused
        self.seconds += other.seconds
        self.worst_s = max(self.worst_s, other.worst_s)
        self.worst_bytes = max(self.worst_bytes, other.worst_bytes)
        self.violations += other.violations
        self.examples = sorted(self.examples + other.examples)[:KEPT_VIOLATIONS]
        self.digest ^= other.digest

    def line(self) -> str:
        causes = ", ".join(f"{count:,} {cause}" for cause, count in self.refused.most_common(3))
        if len(self.refused) > 3:
            causes += f", {len(self.refused) - 3} more causes"
        return (
            f"{self.name:14s} {self.inputs:>9,} inputs, {self.accepted:>9,} accepted, "
            f"{self.refused.total():>9,} refused ({causes or '-'}); {self.seconds:.1f} s, "
            f"worst {self.worst_s * 1e3:.2f} ms and {self.worst_bytes:,} bytes; "
            f"violations {self.violations}; {self.digest:08x}"
        )


def run_blocks(target: Target, blocks: Sequence[int], *, inputs_each: int = BLOCK, memory_every: int = 1) -> Outcome:
    """Every input of these blocks, each with its time; in every memory_every-th block with what it allocated too, which
    takes four times as long."""
    outcome = Outcome(target.name)
    began = time.perf_counter()
    for block in blocks:
        if block % memory_every == 0:
            tracemalloc.start(1)
        try:
            said = _run_block(target, block, inputs_each, outcome)
        finally:
            tracemalloc.stop()
        outcome.digest ^= zlib.crc32(f"{target.name} {block} {said}".encode())
    outcome.seconds = time.perf_counter() - began
    return outcome


def _run_block(target: Target, block: int, inputs: int, outcome: Outcome) -> int:
    """The checksum of all verdicts."""
    rng, said = random.Random(f"{target.name}/{block}"), 0
    for number in range(inputs):
        data = target.input(rng)
        verdict = _judge(target, data, outcome, where=f"block {block}, input {number}")
        said = zlib.crc32(f"{len(data)} {verdict}\n".encode(), said)
    return said


def _judge(target: Target, data: bytes, outcome: Outcome, *, where: str) -> str:
    traced = tracemalloc.is_tracing()
    if traced:
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
    began = time.perf_counter()
    verdict, complaint = _try(target, data)
    seconds = time.perf_counter() - began
    allocated = tracemalloc.get_traced_memory()[1] - held if traced else 0
    if seconds > max(outcome.worst_s, 0.001):  # it may have been another process that took the time
        again = time.thread_time()
        _try(target, data)
        seconds = min(seconds, time.thread_time() - again)
    outcome.inputs += 1
    outcome.worst_s = max(outcome.worst_s, seconds)
    outcome.worst_bytes = max(outcome.worst_bytes, allocated)
    if verdict:
        outcome.refused[verdict] += 1
    elif not complaint:
        outcome.accepted += 1
    if seconds > MAX_INPUT_S:
        complaint = complaint or f"took {seconds:.2f} s"
    if allocated > MAX_BASE_BYTES + MAX_MULTIPLE * len(data):
        complaint = complaint or f"allocated {allocated:,} bytes"
    if complaint:
        outcome.violations += 1
        if len(outcome.examples) < KEPT_VIOLATIONS:
            outcome.examples.append(f"{target.name}, {where}: {complaint}: {data[:200].hex()}")
    return verdict or complaint or "accepted"


def _try(target: Target, data: bytes) -> tuple[str, str]:
    """Why it was refused, and what is wrong with how it was; both empty if it was accepted."""
    try:
        target.decode(data)
        return "", ""
    except target.errors as error:
        return _VALUES.sub("N", getattr(error, "cause", "") or type(error).__name__)[:MAX_CAUSE_CHARS], ""
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"[:200]
