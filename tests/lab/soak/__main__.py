"""`python -m tests.lab.soak [--nodes 8] [--minutes 10] [--seed 0] [--worker tiny|still]`: a cluster under faults.

Home, a relay and stages stand in the NAT lab (root, Linux). A request after the other runs through all stages, while
faults come and go by the seed: edges cut, cables unplugged, loss and delay, frozen, killed and restarted nodes, UDP
blocked, the relay down, routers restarted. Each answer is checked against the oracle: the still worker's, or
llama.cpp's for the tiny model. Exit status 1: a request was lost, an answer was wrong, one failed while no fault was
on, fewer than 80 % were answered, or a node's memory grew.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.nat_lab.lab import NatLab, why_not
from tests.lab.soak.claims import broken_claims, report
from tests.lab.soak.nodes import HOME, RELAY, STANDS, Nodes, sites
from tests.lab.soak.plan import plan
from tests.lab.soak.run import Soak

LIFETIME_BEYOND_S = 900.0  # of the nodes, beyond the soak: they have to start, and to end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="home and the relay among them (default 8)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of faults, prompts and what the lab draws")
    parser.add_argument("--worker", choices=("still", "tiny"), default="tiny", help="what the stages run (tiny)")
    options = parser.parse_args()
    num_stages = options.nodes - 2
    if not 1 <= num_stages <= len(STANDS):
        parser.error(f"--nodes: 3 to {len(STANDS) + 2}")
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    return soak(options, num_stages)


def soak(options: argparse.Namespace, num_stages: int) -> int:
    seconds = options.minutes * 60
    stages = [f"stage-{stage}" for stage in range(num_stages)]
    faults = plan(seed=options.seed, seconds=seconds, home=HOME, relay=RELAY, stages=stages)
    with (
        tempfile.TemporaryDirectory(prefix="ppsmoke-soak-") as folder,
        NatLab(sites(num_stages), seed=options.seed) as lab,
    ):
        nodes = Nodes(
            lab,
            Path(folder),
            num_stages=num_stages,
            worker=options.worker,
            lifetime_s=seconds + LIFETIME_BEYOND_S,
        )
        try:
            run = Soak(lab, nodes, seed=options.seed, worker=options.worker, say=lambda text: print(text, flush=True))
            began = time.monotonic()
            run.start()
            print(f"{options.nodes} nodes, {options.worker} workers, up after {time.monotonic() - began:.0f} s")
            run.play(faults, seconds)
            run.end()
        finally:
            nodes.end()
    print("\n".join(report(run.record)))
    broken = broken_claims(run.record)
    for claim in broken:
        print(f"DOES NOT HOLD: {claim}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
