"""What two stages fetch of a big model: `python -m tests.lab.big_ranges [--keep FOLDER]`.

Makes a GGUF of llama3.2:1b's shape and vocabulary with random weights (0.8 GB), serves it over https on loopback behind
a redirect to another port and path, and runs:
1. the whole two-stage run with an empty cache (local stages share one: what one brought, the other need not);
2. the same again: nothing may be fetched;
3. each stage's worker alone, its pieces taken out of the cache before: as on a machine of its own.
In 1, and for each stage in 3, one connection is cut in the middle. Prints bytes fetched, as the stages and as the
server count them. Exit status 1 if anything is not as it should be. Takes 2 GB of disk and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppsmoke.worker.fetch import FileSource
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.http_source import SEGMENT_BYTES
from ppsmoke.worker.llama import LlamaConfig, layer_range
from ppsmoke.worker.weights import stage_tensors
from tests.lab.big_gguf import BigLlama
from tests.lab.commands import ppsmoke
from tests.lab.range_server import (
    RangeServer,
    answer_well,
    cut,
    hang_up_after,
    resumptions,
    sent_twice,
    serving_https_with_a_redirect,
    trusting,
)

STAGES, CONTEXT, BUDGET_S = 2, 128, 900
CUT_AFTER_BYTES = 20 * SEGMENT_BYTES + 345_678  # of the third answer, the first large one: in the middle of a segment


class Checks:
    """What is claimed, printed as it is found out."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, claim: str, holds: bool) -> None:
        print(f"  {'ok  ' if holds else 'FAIL'} {claim}", flush=True)
        self.failed += not holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="make the model here and leave it (default: do not)"
    )
    options = parser.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="ppsmoke-ranges-") as temporary:
        home = Path(temporary)
        path = _model(options.keep or home)
        needs = [_needs(path, stage) for stage in range(STAGES)]
        with _mapped(path) as data, serving_https_with_a_redirect(data) as (front, store):
            print(f"served at {front.url}, which redirects to {store.url}")
            environment = trusting({"XDG_CACHE_HOME": str(home / "cache")})
            _cold(front, store, home, environment, checks)
            _warm(front, store, home, environment, checks)
            for stage, (own, header) in enumerate(needs):
                shutil.rmtree(home / "cache" / "ppsmoke" / "ranges")
                _alone(stage, own, header, front, store, environment, checks)
    print("all as it should be" if not checks.failed else f"{checks.failed} claims do not hold")
    return int(checks.failed > 0)


def _model(folder: Path) -> Path:
    path, begin = folder / "big.gguf", time.monotonic()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        BigLlama.made().write(path.with_suffix(".part")).rename(path)
    print(f"{path}: {path.stat().st_size:,} bytes, made in {time.monotonic() - begin:.1f} s", flush=True)
    return path


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """The file's bytes without holding them."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as view:
            yield view


def _needs(path: Path, stage: int) -> tuple[int, int]:
    """Bytes of a stage's own tensors, and of the file's header."""
    source = FileSource(path)
    gguf = Gguf.read(source)
    source.close()
    config = LlamaConfig.from_gguf(gguf)
    names = stage_tensors(gguf, config, layer_range(config.blocks, stage, STAGES))
    own = sum(gguf.tensors[name].nbytes for name in names)
    return own, min(tensor.offset for tensor in gguf.tensors.values())


def _run(front: RangeServer, home: Path, environment: dict[str, str], checks: Checks) -> dict[str, Any]:
    arguments = ["--max-tokens", "4", "--stages", str(STAGES), "--max-context", str(CONTEXT), "--json", "--raw"]
    arguments += ["--model", front.url, "--budget", str(BUDGET_S)]
    print(f"python -m ppsmoke {' '.join(arguments)}", flush=True)
    begin = time.monotonic()
    said = ppsmoke(*arguments, home=home, environment=environment, within_s=BUDGET_S + 60)
    print(f"  exit status {said.status} after {time.monotonic() - begin:.1f} s")
    checks("exit status 0", said.status == 0)
    if said.status:
        print(said.stderr[-4000:])
        return {"ok": False, "stages": []}
    out = said.json
    print(f"  token ids {out['token_ids']} for {len(out['prompt_token_ids'])} of prompt")
    for stage in out["stages"]:
        print(
            f"  stage {stage['stage']} (blocks {stage['blocks']}): {stage['bytes_read']:,} bytes fetched, loaded in "
            f"{stage['load_s']:.1f} s, warm after {stage['warmup_s']:.1f} s, peak {stage['peak_rss_bytes'] >> 20} MiB"
        )
    return out


def _cold(front: RangeServer, store: RangeServer, home: Path, environment: dict[str, str], checks: Checks) -> None:
    print("\nan empty cache, which both stages share; one connection is cut")
    _begin_anew(front, store)
    out = _run(front, home, environment, checks)
    checks("the answer is ok", out["ok"] is True)
    size, fetched = len(store.data), sum(stage["bytes_read"] for stage in out["stages"])
    print(f"  both stages together fetched {fetched:,} bytes")
    _tell_the_server(front, store, fetched, checks)
    checks("each stage fetched less than the file", all(0 < s["bytes_read"] < size for s in out["stages"]))


def _begin_anew(front: RangeServer, store: RangeServer) -> None:
    """Forget what was asked; the third answer, the first large one, will be cut."""
    for record in (front.requests, store.requests, store.sent):
        record.clear()
    store.faults = [answer_well(), answer_well(), hang_up_after(CUT_AFTER_BYTES)]


def _tell_the_server(front: RangeServer, store: RangeServer, fetched: int, checks: Checks) -> None:
    """The server's view of a run with one cut, against the bytes that its clients counted."""
    sent, again = sum(end - begin for begin, end in store.sent), sent_twice(store.sent)
    print(f"  server: {len(store.requests)} requests ({len(front.requests)} redirects), {sent:,} bytes sent")
    for begin, reached in cut(store):
        print(f"  cut: the answer from byte {begin:,} ended at {reached:,}")
    for begin, end in resumptions(store):
        print(f"  resumed: bytes {begin:,} to {end:,}")
    print(f"  bytes sent twice: {again:,}")
    checks("every request was redirected", len(front.requests) == len(store.requests))
    checks("one answer was cut, and its rest asked for once", len(cut(store)) == len(resumptions(store)) == 1)
    checks("only the piece of a segment before the cut was sent twice", again == CUT_AFTER_BYTES % SEGMENT_BYTES)
    checks("the server sent what the stages count, and that piece", sent == fetched + again)


def _warm(front: RangeServer, store: RangeServer, home: Path, environment: dict[str, str], checks: Checks) -> None:
    print("\nthe same again, from the cache")
    before = len(front.requests) + len(store.requests)
    out = _run(front, home, environment, checks)
    checks("no stage fetched a byte", out["ok"] and not any(stage["bytes_read"] for stage in out["stages"]))
    checks("the server was not asked", len(front.requests) + len(store.requests) == before)


def _alone(
    stage: int, own: int, header: int, front: RangeServer, store: RangeServer, more: dict[str, str], checks: Checks
) -> None:
    """One stage's worker with nothing of the model in its cache."""
    print(f"\nstage {stage} alone, as on a machine of its own; one connection is cut")
    _begin_anew(front, store)
    environment = os.environ | more | {"MODEL": front.url, "STAGE": str(stage), "NUM_STAGES": str(STAGES)}
    environment["PPSMOKE_NODE_MAX_CONTEXT"] = str(CONTEXT)
    command = [sys.executable, "-m", "ppsmoke.worker"]
    done = subprocess.run(command, input=b"", capture_output=True, env=environment, timeout=BUDGET_S)
    last = json.loads(done.stdout.splitlines()[-1])
    checks("the stage became ready", last["status"] == "ready")
    if last["status"] != "ready":
        print(last, done.stderr.decode(errors="replace")[-2000:])
        return
    size, fetched = len(store.data), last["bytes_read"]
    print(f"  fetched {fetched:,} bytes, {100 * fetched / size:.1f} % of the file's {size:,}")
    print(f"  its tensors {own:,} and the header {header:,}: {own + header:,}; beyond them {fetched - own - header:,}")
    print(f"  loaded in {last['load_s']:.1f} s, peak {last['peak_rss_bytes'] >> 20} MiB")
    _tell_the_server(front, store, fetched, checks)
    # Two stretches of the file, the embedding and the blocks, each widened to whole segments at both ends.
    checks(
        "beyond its tensors and the header it fetched only the edges of segments",
        0 <= fetched - own - header < 4 * SEGMENT_BYTES,
    )


if __name__ == "__main__":
    sys.exit(main())
