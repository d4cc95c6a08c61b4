"""What the outage table makes of its findings; what it measures takes minutes, and is a command."""

from __future__ import annotations

import pytest

from tests.lab.outage_table import line

FINE = {"sent": 3, "answers": [0, 1, 2], "silent_s": 8.9, "lost": ""}


@pytest.mark.parametrize(
    ("changes", "says", "as_wished"),
    [
        ({}, "2 rooms    0 lost  silent 8.9 to 8.9 s  6 answers, 0 rooms with one twice or never", True),
        ({"answers": [0, 1, 1, 2]}, "1 rooms with one twice or never", False),
        ({"answers": [0, 2]}, "1 rooms with one twice or never", False),
        ({"lost": "stage-0-of-2: no byte", "answers": []}, "1 lost", False),
    ],
)
def test_a_room_that_lost_its_stage_or_an_answer_fails_the_table(changes, says, as_wished):
    text, verdict = line(8.0, [FINE, FINE | changes])
    assert says in text and verdict is as_wished
