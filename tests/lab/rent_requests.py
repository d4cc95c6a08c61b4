"""How many calls a rented run makes on each route, how many in its busiest second, and which came too early.

python -m tests.lab.rent_requests [--stages 2 8] [--time-scale 1]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.lab.rented import Ended, rented


def by_route(ended: Ended) -> dict[str, list[float]]:
    """When each route was called; ids are taken out of the paths."""
    times: dict[str, list[float]] = defaultdict(list)
    for request in ended.ledger["requests"]:
        path = re.sub(r"\d{4,}", "ID", request["path"].partition("?")[0])
        times[f"{request['method']} {path}"].append(request["t"])
    return times


def busiest_second(times: Sequence[float]) -> int:
    return max(Counter(int(at - min(times)) for at in times).values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="*", type=int, default=[2, 8])
    parser.add_argument("--time-scale", type=float, default=1.0)
    options = parser.parse_args(argv)
    bad = 0
    print("| stages | route | calls | most in a second |\n| --- | --- | --- | --- |")
    for stages in options.stages:
        with tempfile.TemporaryDirectory(prefix="ppsmoke-calls-") as folder:
            with rented(Path(folder), boots=True, scale=options.time_scale) as lab:
                ended = lab.run("--stages", str(stages), "--max-usd", "20", "--max-tokens", "8")
        for route, times in sorted(by_route(ended).items()):
            print(f"| {stages} | {route} | {len(times)} | {busiest_second(times)} |")
        early = ended.ledger["too_early"]
        print(f"| {stages} | all, in {ended.seconds:.0f} s, exit {ended.status}, too early: {early or 'none'} | "
              f"{len(ended.ledger['requests'])} | |", flush=True)  # fmt: skip
        bad += ended.status != 0 or bool(early)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
