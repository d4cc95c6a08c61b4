"""Two rows of the detection table, in real time; the rest is a command."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ppsmoke.cluster.peer import LINK_GRACE_S
from ppsmoke.rent.fleet import Fleet
from tests.lab.detection_table import ROWS, SILENT, complaints, run_row
from tests.lab.nat_lab.home_run import PlacedFleet
from tests.lab.nat_lab.lab import why_not
from tests.lab.nat_lab.placed_run import Ended

IN_CI = ("the worker of a stage is killed", "a host is cut off silently")
CUT_OFF = next(row for row in ROWS if row.name == IN_CI[1])
AWAKE = next(row for row in ROWS if row.within_s is None)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the lab runs")
@pytest.mark.slow
def test_a_run_notices_in_time_and_says_what():
    """Beside other tests SWIM's verdict may come late; then a link's grace decides."""
    rows = [row for row in ROWS if row.name in IN_CI]
    with ThreadPoolExecutor(len(rows)) as pool:
        ends = zip(rows, pool.map(run_row, rows), strict=True)
        found = {row.name: complaints(row, ended, allowance_s=LINK_GRACE_S) for row, ended in ends}
    assert found == {name: [] for name in IN_CI}


def test_the_labs_fleet_has_all_that_a_run_asks_of_one():
    asked = {*Fleet.__annotations__, *(name for name in vars(Fleet) if not name.startswith("_"))}
    assert {name for name in asked if not hasattr(PlacedFleet, name)} == set()


def ended(status: int, seconds: float, stderr: str) -> Ended:
    return Ended(status=status, seconds=seconds, stdout="", stderr=stderr)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (ended(1, 15.0, "ppsmoke: ask, stage 1: stage-1-of-2: no byte for 15 s"), []),
        (ended(1, 99.0, "ppsmoke: ask, stage 1: stage-1-of-2: no byte for 15 s"), ["it took 99.0 s"]),
        (ended(1, 15.0, "ppsmoke: ask, stage 1: nothing has moved for 30 s"), [f"{SILENT[1]!r} was not said"]),
        (ended(0, 15.0, "ppsmoke: ask, stage 1: stage-1-of-2: no byte for 15 s"), ["exit status 0"]),
        (ended(1, 15.0, "ppsmoke: ask, stage 0: stage-0-of-2: no byte for 15 s"), ["'ask, stage 1: ' was not said"]),
    ],
)
def test_a_row_is_held_against_its_bound_and_its_words(found, complaint):
    assert complaints(CUT_OFF, found) == complaint


def test_where_nothing_may_happen_a_failure_is_a_complaint():
    assert complaints(AWAKE, ended(1, 5.0, "ppsmoke: ask: lost")) == [
        "exit status 1, where nothing may happen: ppsmoke: ask: lost"
    ]
