"""The arithmetic of patience, and that the core is pure."""

from __future__ import annotations

import ast
from pathlib import Path as FilePath

import pytest

import ppsmoke.cluster
from ppsmoke.cluster.swim_paths import Path
from ppsmoke.cluster.swim_state import (
    MILLISECOND,
    SECOND,
    Config,
    confirmations_wanted,
    retransmissions,
    suspicion_bounds,
    suspicion_time,
)

CONFIG = Config()
PURE = ("swim*.py", "names.py", "seal.py")


@pytest.mark.parametrize(
    ("size", "wanted", "seconds_by_confirmations"),
    [
        (1, 0, [30.0]),
        (2, 0, [30.0]),  # nobody could confirm
        (3, 1, [30.0, 10.0]),
        (4, 2, [30.0, 17.381, 10.0]),
        (5, 3, [30.0, 20.0, 14.150, 10.0]),
        (10, 8, [30.0, 23.691, 20.0, 17.381, 15.350, 13.691, 12.288, 11.072, 10.0]),
        (12, 8, [31.242, 24.671, 20.828, 18.101, 15.986, 14.257, 12.796, 11.530, 10.414]),
        (20, 8, [38.364, 30.296, 25.576, 22.227, 19.630, 17.508, 15.713, 14.159, 12.788]),
    ],
)
def test_each_confirmation_shortens_the_suspicion_down_to_its_minimum(size, wanted, seconds_by_confirmations):
    least, greatest = suspicion_bounds(CONFIG, size=size, patient=False)
    assert confirmations_wanted(CONFIG, size=size) == wanted
    times = [suspicion_time(least, greatest, confirmations=c, wanted=wanted) for c in range(wanted + 1)]
    assert [time / SECOND for time in times] == seconds_by_confirmations


def test_more_confirmations_than_wanted_change_nothing():
    assert suspicion_time(10 * SECOND, 30 * SECOND, confirmations=7, wanted=2) == 10 * SECOND


@pytest.mark.parametrize(("size", "least"), [(2, 15_000), (4, 15_000), (12, 15_621), (20, 19_182)])
def test_whoever_refuted_lately_gets_half_as_much_again(size, least):
    assert suspicion_bounds(CONFIG, size=size, patient=True) == (least * MILLISECOND, 3 * least * MILLISECOND)


@pytest.mark.parametrize(("size", "times"), [(1, 4), (2, 4), (3, 4), (9, 4), (10, 8), (20, 8), (99, 8), (100, 12)])
def test_an_update_is_told_four_times_the_digits_of_the_cluster(size, times):
    assert retransmissions(CONFIG, size=size) == times


def test_the_probe_timeout_follows_the_round_trips_between_its_bounds():
    path = Path()
    assert path.timeout(CONFIG) == 3 * SECOND  # not measured yet
    path.sample(100_000)
    assert (path.srtt, path.rttvar, path.timeout(CONFIG)) == (100_000, 50_000, 400_000)
    path.sample(900_000)
    assert (path.srtt, path.rttvar, path.timeout(CONFIG)) == (200_000, 237_500, 1_150_000)
    for _ in range(50):
        path.sample(5_000_000)
    assert path.timeout(CONFIG) == 3 * SECOND


def test_the_core_imports_no_clock_no_socket_and_no_loop():
    folder = FilePath(ppsmoke.cluster.__file__).parent
    forbidden = {"time", "socket", "asyncio", "datetime", "os", "threading", "secrets", "select"}
    files = [file for pattern in PURE for file in sorted(folder.glob(pattern))]
    assert len(files) >= 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & (forbidden | {"random"}), file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, file
                if node.module == "random":  # the type of the generator that is passed in, nothing else
                    assert [alias.name for alias in node.names] == ["Random"], file
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("Random", "id", "hash"), file
