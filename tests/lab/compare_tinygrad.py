"""Our two-stage pipeline beside tinygrad's own whole-model program (`tinygrad.apps.llm`, float32), in one run.

    python -m tests.lab.compare_tinygrad [--model smollm2:135m] [--repeats 3]

Alternates the two; every figure is a pair from the same repeat, and what counts is their ratio. Both use the same
tinygrad, model file, context, prompt ids and kernel cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

from ppsmoke import smoke
from ppsmoke.package import own_command
from ppsmoke.rent.loopback import LoopbackFleet
from ppsmoke.report.progress import QUIET, Progress
from ppsmoke.report.summary import RunRecord
from ppsmoke.settings import Settings
from ppsmoke.waiting import Deadline
from ppsmoke.worker import fetch

CONTEXT = 2048
DECODED = 64
COUNTED = slice(8, None)  # tokens 9 to 64: both sides have compiled by then
LONG_WORDS = "In the morning the old fisherman walked down to the harbour, looked at the clouds and counted his boats. "
LONG_PROMPT = LONG_WORDS * 28 + "In the morning the old fisherman walked down to the harbour,"  # 600 tokens of SmolLM2
PEER_BUDGET_S = 400

PEER = """
import json, os, sys, time, resource
started = float(sys.argv[1])
from tinygrad import Tensor, Device
from tinygrad.apps.llm import Transformer
path, context, jobs = sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
model, kv = Transformer.from_gguf(Tensor(__import__("pathlib").Path(path)), context)
Device[Device.DEFAULT].synchronize()
out = {"load_s": time.time() - started}
def ask(ids, count):
    times, tokens, before = [], [], time.perf_counter()
    for token in model.generate(list(ids)):
        now = time.perf_counter(); times.append(now - before); before = now; tokens.append(token)
        if len(tokens) == count: return times, tokens
out["decode"], out["tokens"] = ask(jobs["decode"], 64)
out["prefill_first"] = ask(jobs["prefill"], 1)[0][0]
out["prefill"] = ask(jobs["prefill"], 1)[0][0]
out["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(out))
"""


def peer(path: str, jobs: dict[str, list[int]]) -> dict:
    """tinygrad's program on the same file and ids: seconds to load, per token, for the long prompt."""
    environment = os.environ | {"HALF": "0"}
    command = [sys.executable, "-c", PEER, str(time.time()), path, str(CONTEXT), json.dumps(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PEER_BUDGET_S)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


async def ours(model: str) -> dict:
    """The same from our pipeline of two stages: one decode of 64 tokens, one long prompt."""
    settings = Settings(model=model, max_context=CONTEXT, wire_dtype="float32")
    record = RunRecord(run_id=settings.run_id, model_name=model, num_stages=2)
    progress = Progress(record, verbosity=QUIET)
    deadline = Deadline.after(300)

    def open_fleet(_: Progress) -> LoopbackFleet:
        return LoopbackFleet(on_line=progress.child_line)

    async with smoke.stages_up(settings, progress, open_fleet, deadline) as pipeline:
        short = await pipeline.ask("Write a long story about a boat.", raw=False, max_tokens=DECODED, deadline=deadline)
        decode = [ms / 1e3 for ms in record.token_ms()]
        long = await pipeline.ask(LONG_PROMPT, raw=True, max_tokens=2, deadline=deadline)
        prefill = record.to_json()["timing"]["prefill_s"]
    stages = record.to_json()["stages"]
    return {
        "load_s": max(stage["load_s"] for stage in stages),
        "decode": decode,
        "tokens": list(short.token_ids),
        "prefill": prefill,
        "peak_rss": [stage["peak_rss_bytes"] for stage in stages],
        "weights": [stage["weight_bytes"] for stage in stages],
        "jobs": {"decode": list(short.prompt_token_ids), "prefill": list(long.prompt_token_ids)},
    }


def whole_command(model: str) -> float:
    """Wall clock of `python -m ppsmoke --json`."""
    began = time.monotonic()
    command, environment = own_command()
    subprocess.run([*command, "--json", "-q", "--model", model], env=os.environ | environment, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings.model)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    path = str(fetch.open_model(arguments.model, progress=lambda *_: None).path.resolve())
    rows = []
    for repeat in range(arguments.repeats):
        wall = whole_command(arguments.model)
        mine = asyncio.run(ours(arguments.model))
        theirs = peer(path, mine["jobs"])
        my_decode, their_decode = (statistics.median(side["decode"][COUNTED]) for side in (mine, theirs))
        same = sum(a == b for a, b in zip(mine["tokens"], theirs["tokens"], strict=False))
        rows.append((theirs["load_s"] / mine["load_s"], their_decode / my_decode, theirs["prefill"] / mine["prefill"]))
        print(
            f"repeat {repeat + 1}: command {wall:.1f} s | load {mine['load_s']:.2f} / {theirs['load_s']:.2f} s "
            f"= {rows[-1][0]:.1f}x | decode {my_decode * 1e3:.1f} / {their_decode * 1e3:.1f} ms = {rows[-1][1]:.2f}x | "
            f"prefill of {len(mine['jobs']['prefill'])} {mine['prefill']:.2f} / {theirs['prefill']:.2f} s "
            f"(its first {theirs['prefill_first']:.2f}) = {rows[-1][2]:.2f}x | first {same} of {len(mine['tokens'])} "
            f"tokens alike | RSS {[round(b / 1e6) for b in mine['peak_rss']]} / {theirs['peak_rss'] / 1e6:.0f} MB, "
            f"weights {[round(b / 1e6) for b in mine['weights']]} MB",
            flush=True,
        )
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"median ratios, tinygrad's / ours: load {medians[0]:.1f}, decode {medians[1]:.2f}, prefill {medians[2]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
