"""`python -m tests.lab.fuzz_cluster`: mutated inputs into every decoder of the cluster, the pipeline and the boot.

Only a decoder's documented error may come out, in bounded time and with bounded memory. Input number n of a decoder is
the same on every machine, however the work is split: blocks of 1,000 inputs have seeds of their own, from --first on.
One line per decoder; the last word of it is a digest of all verdicts. The exit status is 1 if there was a violation.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time

from tests.lab.fuzz import beyond, plain, stateful
from tests.lab.fuzz.target import BLOCK, Outcome, Target, run_blocks

BLOCKS_AT_ONCE = 5  # that a process takes: the last ones shall not be left with one


def decoders() -> dict[str, Target]:
    return {target.name: target for target in (*plain.targets(), *stateful.targets(), *beyond.targets())}


_DECODERS: dict[str, Target] = {}


def _run(work: tuple[str, range, int]) -> Outcome:
    name, blocks, memory_every = work
    if not _DECODERS:  # once per process
        logging.disable()  # a warning for each of a million inputs helps nobody
        _DECODERS.update(decoders())
    return run_blocks(_DECODERS[name], blocks, memory_every=memory_every)


def main() -> int:
    names = list(decoders())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--inputs", type=int, default=100_000, help="for each decoder, in thousands (default 100,000)")
    parser.add_argument("--first", type=int, default=0, help="the first block (default 0), to split a long run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per processor)")
    parser.add_argument("--memory-every", type=int, default=1, help="measure memory in every Nth block (default 1)")
    arguments = parser.parse_args()
    blocks = range(arguments.first, arguments.first + -(-arguments.inputs // BLOCK))
    began, violations, inputs = time.monotonic(), 0, 0
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for name in arguments.decoder:
            starts = range(0, len(blocks), BLOCKS_AT_ONCE)
            parts = [(name, blocks[at : at + BLOCKS_AT_ONCE], arguments.memory_every) for at in starts]
            outcome = Outcome(name)
            for part in pool.imap_unordered(_run, parts):
                outcome.add(part)
            print(outcome.line(), flush=True)
            for example in outcome.examples:
                print(f"  {example}", flush=True)
            violations += outcome.violations
            inputs += outcome.inputs
    seconds = time.monotonic() - began
    print(f"{len(arguments.decoder)} decoders, {inputs:,} inputs, {violations} violations, {seconds:.0f} s")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
