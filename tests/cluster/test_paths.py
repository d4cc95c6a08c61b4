"""Path choice by table: orders, moments and words are numbers and values, no clock and no socket."""

from __future__ import annotations

import pytest

from ppsmoke.cluster import paths
from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.handshake import LinkKind
from ppsmoke.cluster.paths import Attempt, Mapping, Upgrades

HOST = Candidate("host", "10.0.0.7", 7070)
MAPPED = Candidate("mapped", "203.0.113.7", 40001)
SAME_AS_MAPPED = Candidate("host", "203.0.113.7", 40001)
DIRECT, PUNCHED, RELAYED = LinkKind.DIRECT, LinkKind.PUNCHED, LinkKind.RELAYED


@pytest.mark.parametrize(
    ("told", "said", "gossiped", "order"),
    [
        (None, (), (), []),
        (MAPPED, (), (), [MAPPED]),
        (None, (MAPPED, HOST), (), [HOST, MAPPED]),
        (MAPPED, (HOST, MAPPED), (), [MAPPED, HOST]),
        (None, (), (MAPPED, HOST), [HOST, MAPPED]),
        (None, (MAPPED,), (SAME_AS_MAPPED,), [SAME_AS_MAPPED]),  # host before mapped, each socket once
        (None, (Candidate("observed", "203.0.113.7", 5),), (), []),
    ],
)
def test_a_peer_is_dialled_where_we_were_told_then_at_home_then_where_it_is_mapped(told, said, gossiped, order):
    assert paths.candidates_in_order(told, said, gossiped) == order


@pytest.mark.parametrize(
    ("candidates", "relays", "attempts"),
    [
        ([], [], []),
        ([HOST, MAPPED], [], [Attempt(DIRECT, 0.0, HOST), Attempt(DIRECT, 0.25, MAPPED)]),
        ([], ["r1", "r2"], [Attempt(RELAYED, 0.0, relay="r1"), Attempt(RELAYED, 0.25, relay="r2")]),
        ([MAPPED], ["r1"], [Attempt(DIRECT, 0.0, MAPPED), Attempt(RELAYED, 1.0, relay="r1")]),
        ([], ["r1", "r2", "r3", "r4"], [Attempt(RELAYED, n * 0.25, relay=f"r{n + 1}") for n in range(3)]),
    ],
)
def test_a_relay_leg_gives_direct_dials_a_second_and_starts_at_once_without_them(candidates, relays, attempts):
    assert paths.first_link(candidates, relays) == attempts


def test_a_better_path_is_sought_by_a_hole_and_by_dials_at_once():
    assert paths.better_link([HOST], relay="r1") == [Attempt(PUNCHED, 0.0, relay="r1"), Attempt(DIRECT, 0.0, HOST)]
    assert paths.better_link([HOST], relay=None) == [Attempt(DIRECT, 0.0, HOST)]


def moments(upgrades: Upgrades, *, until: float) -> list[tuple[float, bool]]:
    """When rounds begin from now (100 s) on, and whether they may punch."""
    now, found = 100.0, []
    while (due_in_s := upgrades.due_in_s(now)) is not None and now + due_in_s <= until:
        now += due_in_s
        found.append((now - 100.0, upgrades.begin(now)))
    return found


def test_a_relayed_link_is_punched_three_times_and_then_dialled_every_minute():
    upgrades = Upgrades()
    upgrades.linked(RELAYED, 100.0)
    assert moments(upgrades, until=250.0) == [(0, True), (5, True), (20, True), (80, False), (140, False)]


def test_a_punched_link_is_not_punched_again_but_dialled():
    upgrades = Upgrades()
    upgrades.linked(PUNCHED, 100.0)
    assert moments(upgrades, until=190.0) == [(5, False), (20, False), (80, False)]


def test_a_direct_link_is_left_alone():
    upgrades = Upgrades()
    upgrades.linked(DIRECT, 100.0)
    assert upgrades.due_in_s(1e9) is None


def test_a_hopeless_hole_is_not_tried_again_and_its_reason_stays():
    upgrades = Upgrades()
    upgrades.linked(RELAYED, 100.0)
    assert upgrades.begin(100.0)
    upgrades.no_punch("no hole: the NAT of stage-0 uses another port per destination", for_good=True)
    assert moments(upgrades, until=125.0) == [(5, False), (20, False)]
    upgrades.lost(130.0)
    upgrades.linked(RELAYED, 131.0)
    assert not upgrades.begin(131.0) and "another port per destination" in upgrades.note


@pytest.mark.parametrize(("lived_s", "punches"), [(29.0, False), (31.0, True)])
def test_a_hole_that_fell_in_at_once_is_not_dug_again_soon(lived_s, punches):
    upgrades = Upgrades()
    upgrades.linked(PUNCHED, 100.0)
    upgrades.lost(100.0 + lived_s)
    upgrades.linked(RELAYED, 140.0)
    assert upgrades.begin(140.0) is punches
    assert upgrades.begin(140.0 + paths.PUNCH_BAN_S)  # the second round, five minutes later


@pytest.mark.parametrize(("for_good", "punches"), [(False, True), (True, False)])
def test_a_new_life_of_the_peer_may_be_punched_unless_its_nat_made_that_hopeless(for_good, punches):
    upgrades = Upgrades()
    upgrades.linked(PUNCHED, 100.0)
    upgrades.no_punch("", for_good=for_good)
    upgrades.lost(101.0)  # the old life was killed: no fault of the hole's
    upgrades.restarted()
    upgrades.linked(RELAYED, 102.0)
    assert upgrades.begin(102.0) is punches


def test_the_same_kind_of_link_again_does_not_begin_the_rounds_anew():
    upgrades = Upgrades()
    upgrades.linked(RELAYED, 100.0)
    upgrades.begin(100.0)
    upgrades.linked(RELAYED, 103.0)  # over another relay
    assert upgrades.due_in_s(103.0) == 2.0


SEEN = ("198.51.100.1", 50_000)


@pytest.mark.parametrize(
    ("local_port", "first", "second", "says"),
    [
        (50_000, SEEN, SEEN, ""),
        (41_000, SEEN, SEEN, ""),  # moved, but alike for all
        (50_000, SEEN, None, ""),
        (41_000, SEEN, None, "no second relay port could tell"),
        (50_000, SEEN, ("198.51.100.1", 50_001), "another port per destination"),
        (41_000, SEEN, ("198.51.100.1", 60_001), "another port per destination"),
        (50_000, SEEN, ("198.51.100.2", 50_000), "another address per destination"),
    ],
)
def test_a_hole_is_tried_only_where_the_next_port_can_be_foretold(local_port, first, second, says):
    reason = paths.why_no_hole("stage-0", Mapping(local_port, first, second))
    assert says in reason and bool(says) == bool(reason) and ("stage-0" in reason) == bool(says)


def test_both_sides_start_together_the_near_one_waits():
    assert paths.start_delays_us(20_000, 120_000) == (50_000, 0)
    assert paths.start_delays_us(120_000, 20_000) == (0, 50_000)


FORWARDED = Candidate("mapped", "192.0.2.1", 7070)


@pytest.mark.parametrize(
    ("candidates", "own", "cause", "hint"),
    [
        ([], [], "no port of theirs is known", "rent that stage with a direct"),
        ([MAPPED], [], "nobody answers at 203.0.113.7:40001, this machine has no forwarded port", "forward a TCP port"),
        ([MAPPED], [FORWARDED], "nobody came to this machine at 192.0.2.1:7070", "see why what is forwarded"),
    ],
)
def test_an_unreachable_peer_is_explained_with_what_each_side_could_change(candidates, own, cause, hint):
    text, advice = paths.unreachable("stage-0-of-2", "connection refused", candidates=candidates, own=own)
    assert text.startswith("stage-0-of-2 cannot be reached") and cause in text and "(connection refused)" in text
    assert hint in advice and "rent that stage with a direct (mapped) TCP port" in advice
