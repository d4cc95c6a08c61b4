"""A fixed tenth of tests/lab/rent_kill_table.py, and one cell of each net alone; the whole is a command."""

from __future__ import annotations

import sys

import pytest

from tests.lab.rent_kill_table import Cell, cells, run_cell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are processes in namespaces")
QUICK = Cell("SIGKILL", "before the reply")
TENTH = list(cells())[::10]


@pytest.mark.slow
def test_a_run_that_is_killed_before_it_knows_what_it_rented_leaves_nothing(tmp_path):
    outcome = run_cell(QUICK, tmp_path)
    assert outcome.fits(QUICK) and outcome.net == "reaper" and outcome.rented == 1 and outcome.live == 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize("cell", TENTH, ids=str)
def test_whatever_kills_a_run_nothing_stays_rented(cell, tmp_path):
    outcome = run_cell(cell, tmp_path)
    assert outcome.fits(cell), (outcome, cell.net)
