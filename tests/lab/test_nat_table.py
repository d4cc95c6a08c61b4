"""The twelve named cells of the reachability table, with real nodes and a real request; and how they are judged."""

import sys

import pytest

from tests.lab.nat_lab.expected import HOME, IN_CI, NAMED, PAIRS, expected
from tests.lab.nat_lab.lab import why_not
from tests.lab.nat_lab.meeting import Outcome, RunResult, names_a_remedy
from tests.lab.nat_table import chosen, outcomes

needs_lab = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab runs")
computes = sys.version_info >= (3, 11)  # what a computing stage needs
PUNCHED, NOBODY = NAMED["home-open-stages-punch"][0], NAMED["nobody-can-be-dialled"][0]


@needs_lab
@pytest.mark.slow
def test_the_twelve_named_cells_end_on_their_paths_and_answer_or_fail_with_the_cause():
    found = outcomes(chosen("ci"), jobs=4, real=computes)  # they mostly wait
    assert {name: outcome.complaints() for name, outcome in found} == {name: [] for name in IN_CI}


def outcome(
    cell, paths: str = "DDP", *, message: str = "", failed_after_s: float | None = None, first_s=0.1, verdict: str = ""
) -> Outcome:
    words = {"D": "direct", "P": "punched", "R": "relayed", "x": "impossible", "?": "disputed"}
    return Outcome(
        cell=cell,
        expected=expected(cell),
        paths={pair: words[letter] for pair, letter in zip(PAIRS, paths, strict=True)},
        first_s=dict.fromkeys(PAIRS, first_s),
        path_s=dict.fromkeys(PAIRS, 0.2),
        message=message,
        failed_after_s=failed_after_s,
        stderr={HOME: []},
        run=RunResult(verdict=verdict, detail="as asked", seconds=1.0) if verdict else None,
    )


REMEDY = "nobody can be dialled: rent a stage with a mapped port, or forward one to this machine"


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (outcome(PUNCHED), None),
        (outcome(PUNCHED, "DDR"), "paths DDR, not DDP"),
        (outcome(PUNCHED, "DD?"), r"paths DD\?, not DDP"),
        (outcome(PUNCHED, first_s=None), "no message between home and stage-0"),
        (outcome(PUNCHED, message="2 of 3 there", failed_after_s=20.0), "2 of 3 there"),
        (outcome(NOBODY, "xxx", message=REMEDY, failed_after_s=19.0), None),
        (outcome(NOBODY, "xxx", message=REMEDY, failed_after_s=25.0), "no failure within 20 s"),
        (outcome(NOBODY, "xxx", message="20 s spent", failed_after_s=20.0), "which side must change"),
        (outcome(NOBODY, "DDP"), "paths DDP, not xxx"),
        (outcome(PUNCHED, verdict="right"), None),
        (outcome(PUNCHED, verdict="wrong"), "run wrong: as asked"),
        (outcome(PUNCHED, verdict="failed"), "run failed: as asked"),
        (outcome(NOBODY, "xxx", message=REMEDY, failed_after_s=19.0, verdict="failed"), None),
        (
            outcome(NOBODY, "xxx", message=REMEDY, failed_after_s=19.0, verdict="right"),
            "run right, where no run can be",
        ),
    ],
)
def test_an_outcome_is_held_against_what_was_expected(found, complaint):
    if complaint is None:
        assert found.complaints() == []
    else:
        with pytest.raises(AssertionError, match=complaint):
            raise AssertionError("; ".join(found.complaints()))


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (REMEDY, True),
        ("stage 0 has no mapped port", False),  # and what could be done at home?
        ("stage 1 and home cannot be dialled", False),  # but what should change?
        ("", False),
    ],
)
def test_a_message_must_say_which_side_must_change_what(text, verdict):
    assert names_a_remedy(text) is verdict


def test_cells_are_chosen_by_name_and_a_wrong_name_is_told():
    assert [name for name, _ in chosen("ci")] == list(IN_CI)
    assert len(chosen("all")) == 150
    assert [name for name, _ in chosen("all-open,home-forwarded")] == ["all-open", "home-forwarded"]
    with pytest.raises(ValueError, match="no such cell: nowhere"):
        chosen("nowhere")
