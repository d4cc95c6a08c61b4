"""The oracle's table: `python -m tests.lab.oracle_table [--smollm2] [--stages N ...] [--wire-dtype DTYPE] [model ...]`.

For each model and number of stages: prompts tried, continuations whose ids are all equal, decisive steps compared and
how many of them are equal, and the worst difference of a top logit. Exit status 1 if a decisive step differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.lab.oracle import DATA, Chain, expectations, logit_tolerance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="file names of tiny models (default: all)")
    parser.add_argument(
        "--smollm2",
        nargs="?",
        const="smollm2:135m",
        metavar="GGUF",
        help="SmolLM2-135M, from this file or the catalogue",
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--wire-dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()
    named = options.models or ([] if options.smollm2 else sorted(path.name for path in DATA.glob("tiny*.gguf")))
    models: list[tuple[str, Path | str]] = [(name, DATA / name) for name in named]
    models += [("smollm2", options.smollm2)] if options.smollm2 else []
    print(f"wire dtype {options.wire_dtype}; decisive: margin above 0.05; logits of the first 8 steps")
    print("| model | N | prompts | ids equal | as N = 1 | decisive steps | of them equal | worst logit diff | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    failed = False
    for name, path in models:
        failed |= _rows(name, path, options.stages, options.wire_dtype)
    return int(failed)


def _rows(name: str, path: Path | str, all_stages: list[int], wire_dtype: str) -> bool:
    """A model's rows; True if something in them is wrong."""
    failed = False
    whole: list[list[int]] | None = None
    for stages in all_stages:
        start = time.monotonic()
        chain = Chain(path, stages, wire_dtype=wire_dtype)
        verdicts = [chain.continuation(expected) for expected in expectations(name)]
        ours = [verdict.ours for verdict in verdicts]
        whole = ours if stages == 1 else whole
        same = "-" if whole is None else str(sum(a == b for a, b in zip(ours, whole, strict=True)))
        decisive, equal = sum(v.decisive for v in verdicts), sum(v.decisive_equal for v in verdicts)
        worst = max(verdict.worst_logit for verdict in verdicts)
        print(
            f"| {name} | {stages} | {len(verdicts)} | {sum(v.ids_equal for v in verdicts)} | {same} | {decisive} "
            f"| {equal} | {worst:.5f} | {time.monotonic() - start:.0f} |",
            flush=True,
        )
        for verdict in verdicts:
            if verdict.wrong is not None:
                print(f"  {verdict.name}: step {verdict.wrong} is decisive and differs", flush=True)
        failed |= equal != decisive or (wire_dtype == "float32" and worst > logit_tolerance(name))
    return failed


if __name__ == "__main__":
    sys.exit(main())
