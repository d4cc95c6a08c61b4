"""How many fillers a link sends, by table: as many packets as the messages of late need, and no more."""

from __future__ import annotations

import pytest

from ppsmoke.cluster.warmth import BURST_EVERY_S, MOST_PACKETS, REMEMBER_S, Warmth


@pytest.mark.parametrize(
    ("count", "fillers"),
    [(0, 0), (4096, 0), (12_600, 0), (12_601, 12), (16 << 10, 15), (64 << 10, 58), (4 << 20, MOST_PACKETS * 5 // 4)],
)
def test_a_burst_has_the_packets_of_the_largest_message_and_a_quarter_more_if_an_idle_connection_has_fewer(
    count, fillers
):
    warmth = Warmth()
    warmth.note(count, 10.0)
    assert warmth.fillers_due(10.1) == fillers
    assert warmth.is_needed == (fillers > 0)


def test_bursts_come_within_the_retransmission_timeout_and_single_fillers_between():
    warmth = Warmth()
    warmth.note(16 << 10, 10.0)
    assert [warmth.fillers_due(10.0 + tick / 10) for tick in range(1, 6)] == [15, 1, 15, 1, 15]
    assert BURST_EVERY_S < 0.2


def test_a_large_message_is_forgotten_after_a_while_and_not_by_the_next_small_one():
    warmth = Warmth()
    warmth.note(64 << 10, 10.0)
    warmth.note(4096, 11.0)
    assert warmth.fillers_due(11.0) == 58
    warmth.note(4096, 10.0 + REMEMBER_S + 0.1)
    assert warmth.fillers_due(20.0) == 0
