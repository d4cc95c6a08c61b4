"""Pieces of work that are done some at a time, and come back in order."""

from __future__ import annotations

import os

import pytest

from tests.lab.jobs import in_order


def work(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_come_in_the_order_of_the_work_and_several_jobs_are_other_processes(jobs):
    done = list(in_order(work, [3, 1, 2], jobs=jobs))
    assert [result for result, _ in done] == [9, 1, 4]
    assert (os.getpid() in {pid for _, pid in done}) == (jobs == 1)
