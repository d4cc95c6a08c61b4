"""The soak: its faults follow from the seed, its claims can fail, and twenty seconds of it hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.nat_lab.lab import ROOT, why_not
from tests.lab.soak.asker import Outcome
from tests.lab.soak.claims import GROWTH_MB, broken_claims
from tests.lab.soak.plan import CALM_S, LASTS_S, WAKE_S, Fault, plan
from tests.lab.soak.run import Happened, Record

STAGES = ("stage-0", "stage-1", "stage-2")
NAMES = {"home": "home", "relay": "relay", "stages": STAGES}
CUT = Fault("unplug", 20.0, 10.0, ("home",))


@pytest.mark.parametrize("seed", range(5))
def test_ten_minutes_have_every_fault_and_calm_between_them(seed):
    faults = plan(seed=seed, seconds=600, **NAMES)
    assert faults == plan(seed=seed, seconds=600, **NAMES) != plan(seed=seed + 1, seconds=600, **NAMES)
    assert {fault.kind for fault in faults} == set(LASTS_S)
    quiet_until = 0.0
    calms = []
    for fault in faults:
        calms.append(fault.at_s - quiet_until)
        quiet_until = max(quiet_until, fault.at_s + fault.lasts_s)
    calms = [calm for calm in (*calms, 600 - quiet_until) if calm > 0.5]
    assert len(calms) > 8 and sum(calm >= CALM_S[0] for calm in calms) > len(calms) / 2 and CALM_S[0] > WAKE_S


def request(number: int, asked_s: float, verdict: str = "right", cause: str = "") -> Outcome:
    return Outcome(number=number, asked_s=asked_s, ended_s=asked_s + 1.0, verdict=verdict, cause=cause)


def record(*more: Outcome, mb: tuple[float, float] = (30.0, 31.0), cut_ended_s: float | None = 30.0) -> Record:
    """Eight answers in calm, and a cable that is out from 20 to 30 s."""
    calm = [request(number, number * 2.0) for number in range(1, 9)]
    return Record([*calm, *more], [Happened(CUT, 20.0, cut_ended_s)], {"home": (*mb, 1)})


@pytest.mark.parametrize(
    ("seen", "complaint"),
    [
        (record(request(9, 25.0, "failed", "no link")), ""),
        (record(request(9, 30.0 + WAKE_S - 2, "failed", "no link")), ""),
        (record(request(9, 30.0 + WAKE_S + 1, "failed", "no link")), "no fault was on: requests [9]"),
        (record(request(9, 99.0, "failed", "no link"), cut_ended_s=None), ""),
        (record(request(9, 18.5, "failed", "no link")), "no fault was on: requests [9]"),
        (record(request(9, 25.0, "wrong")), "1 answers are wrong"),
        (record(request(9, 25.0, "lost")), "1 requests are lost"),
        (record(request(9, 25.0, "failed")), "without a cause: requests [9]"),
        (record(*(request(9 + more, 25.0, "failed", "no link") for more in range(3))), "8 of 11 requests answered"),
        (record(mb=(30.0, 30.0 + GROWTH_MB + 1)), "home has grown"),
        (Record(), "no request in calm"),
    ],
)
def test_each_claim_can_fail_and_what_a_fault_explains_breaks_none(seen, complaint):
    found = broken_claims(seen)
    assert complaint in found[0] if complaint else not found, found


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab runs")
def test_a_cluster_under_faults_answers_or_says_why_not_and_loses_nothing():
    options = ["--nodes", "4", "--minutes", "0.33", "--seed", "1", "--worker", "still"]
    command = [sys.executable, "-m", "tests.lab.soak", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong, " in done.stdout and " 0 lost; " in done.stdout
