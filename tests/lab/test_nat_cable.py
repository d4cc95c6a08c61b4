"""What a cable of the lab does to packets: pure, in virtual time."""

import pytest

from tests.lab.nat_lab.cable import Cable, Conditions

PACKET = 1000  # bytes


def arrivals(packets: int, *, every_ms: float = 1.0, seed: str = "a", **conditions: float) -> list[tuple[float, ...]]:
    cable = Cable(Conditions(**conditions), seed=seed)
    return [cable.admit(at * every_ms / 1000, PACKET) for at in range(packets)]


def test_a_perfect_cable_delivers_at_once_and_once():
    assert arrivals(3) == [(0.0,), (0.001,), (0.002,)]


def test_delay_is_added_to_every_packet():
    assert arrivals(2, delay_ms=40) == [(0.04,), (0.041,)]


def test_jitter_keeps_the_order():
    times = [at for (at,) in arrivals(500, delay_ms=10, jitter_ms=30)]
    assert times == sorted(times)
    assert max(at - 0.01 - index / 1000 for index, at in enumerate(times)) <= 0.03 + 1e-9


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_as_much_is_lost_as_was_asked_for(seed):
    lost = arrivals(10_000, loss=0.2, seed=seed).count(())
    assert 1800 < lost < 2200  # 5 standard deviations of a fair coin of 0.2


def test_a_duplicated_packet_arrives_twice():
    assert all(len(times) == 2 for times in arrivals(10, duplicate=1.0))


def test_a_reordered_packet_is_overtaken_by_the_next_ones():
    times = arrivals(1000, reorder=0.1, reorder_ms=5, delay_ms=1)
    late = [index for index, (at,) in enumerate(times) if at > index / 1000 + 0.002]
    assert 50 < len(late) < 150
    assert times[late[0]][0] > times[late[0] + 1][0]


def test_a_slow_cable_spaces_packets_by_their_size():
    # 8 Mbit/s carry a kB in 1 ms: three packets at once leave one after the other.
    assert arrivals(3, every_ms=0, rate_mbit=8) == [(0.001,), (0.002,), (0.003,)]


def test_a_full_queue_drops_the_newest():
    cable = Cable(Conditions(rate_mbit=8, queue_kib=2), seed="a")
    fates = [cable.admit(0.0, PACKET) for _ in range(5)]
    assert [bool(fate) for fate in fates] == [True, True, False, False, False]
    assert cable.counts()["overflowed"] == 3
    assert cable.admit(0.0021, PACKET)  # by then the queue is empty


def test_nothing_passes_a_cut_cable():
    assert arrivals(3, cut=True) == [(), (), ()]


def test_the_same_seed_gives_the_same_fates_and_another_gives_others():
    hostile = {"loss": 0.1, "duplicate": 0.1, "reorder": 0.1, "jitter_ms": 10}
    assert arrivals(200, seed="a", **hostile) == arrivals(200, seed="a", **hostile)
    assert arrivals(200, seed="a", **hostile) != arrivals(200, seed="b", **hostile)


@pytest.mark.parametrize("wrong", [{"loss": 1.5}, {"delay_ms": -1}, {"duplicate": -0.1}])
def test_conditions_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Conditions(**wrong)
