"""What a soak must have shown, and its report in lines. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator

from tests.lab.soak.plan import WAKE_S
from tests.lab.soak.run import Record

ANSWERED_AT_LEAST = 0.8  # of all requests; of those in calm, each
GROWTH_MB = 24.0  # of a node's process from warm to the end: no window, queue or table may fill for ever


def is_calm(record: Record, asked_s: float, ended_s: float) -> bool:
    """Whether no fault was on at any time of the request, nor had ended within WAKE_S before it."""
    return not any(
        happened.began_s <= ended_s and (happened.ended_s is None or happened.ended_s + WAKE_S > asked_s)
        for happened in record.faults
    )


def broken_claims(record: Record) -> list[str]:
    """In words; none: all hold."""
    verdicts = Counter(request.verdict for request in record.requests)
    calm = [request for request in record.requests if is_calm(record, request.asked_s, request.ended_s)]
    found = [record.error] if record.error else []
    if not calm:
        found.append("no request in calm")
    if missed := [request.number for request in calm if request.verdict != "right"]:
        found.append(f"not answered although no fault was on: requests {missed}")
    if verdicts["wrong"]:
        found.append(f"{verdicts['wrong']} answers are wrong")
    if verdicts["lost"]:
        found.append(f"{verdicts['lost']} requests are lost: neither an answer nor a cause")
    if causeless := [r.number for r in record.requests if r.verdict == "failed" and not r.cause]:
        found.append(f"failed without a cause: requests {causeless}")
    if verdicts["right"] < ANSWERED_AT_LEAST * len(record.requests):
        found.append(f"{verdicts['right']} of {len(record.requests)} requests answered")
    for name, (first, last, _) in record.mb.items():
        if last - first > GROWTH_MB:
            found.append(f"{name} has grown from {first:.0f} to {last:.0f} MB")
    return found


def report(record: Record) -> Iterator[str]:
    verdicts = Counter(request.verdict for request in record.requests)
    calm = [request for request in record.requests if is_calm(record, request.asked_s, request.ended_s)]
    total = len(record.requests)
    share = verdicts["right"] / total if total else 0.0
    kinds = Counter(happened.fault.kind for happened in record.faults)
    yield f"faults: {len(record.faults)} ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"
    words = ", ".join(f"{verdicts[name]} {name}" for name in ("right", "wrong", "failed", "lost"))
    yield f"requests: {total}: {words}; {share:.0%} answered"
    yield f"while no fault was on: {sum(request.verdict == 'right' for request in calm)} of {len(calm)} answered"
    for name, some in (("in calm", calm), ("all", record.requests)):
        if times := [request.ended_s - request.asked_s for request in some if request.verdict == "right"]:
            yield f"time to an answer, {name}: p50 {statistics.median(times):.2f} s, longest {max(times):.1f} s"
    # The first words, without their seconds: the rest says which ways were tried meanwhile.
    heads = (re.sub(r" for \d+ s", "", r.cause.partition(" (")[0]) for r in record.requests if r.verdict == "failed")
    causes = Counter(heads)
    for cause, count in causes.most_common():
        yield f"  {count} failed: {cause}"
    yield f"{'memory of a node, MB':22} {'start':>7} {'end':>7}  lives"
    for name, (first, last, lives) in record.mb.items():
        yield f"{name:22} {first:7.1f} {last:7.1f}  {lives}"
