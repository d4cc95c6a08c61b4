"""Who has to go when the door is full."""

from __future__ import annotations

import pytest

from ppsmoke.cluster.crowd import Crowd, neighbourhood


def crowd_of(*hosts: str, most: int) -> tuple[Crowd[int], list[int | None]]:
    """Everybody is a number, in the order of coming; and who had to go for each."""
    crowd: Crowd[int] = Crowd(most)
    return crowd, [crowd.enter(number, host) for number, host in enumerate(hosts)]


def test_while_there_is_room_nobody_goes():
    crowd, gone = crowd_of("a", "a", "b", most=3)
    assert gone == [None] * 3 and len(crowd) == 3


@pytest.mark.parametrize(
    ("hosts", "gone"),
    [
        (("a", "a", "a", "a"), 0),  # one address alone: its oldest
        (("a", "b", "b", "b"), 1),  # the oldest of all is somebody else's
        (("a", "b", "b", "c"), 1),  # the newcomer's address holds little
        (("a", "b", "c", "d"), 0),  # all the same: the oldest
    ],
)
def test_the_oldest_of_whoever_holds_most_goes(hosts, gone):
    crowd, said = crowd_of(*hosts, most=3)
    assert said == [None, None, None, gone]
    assert len(crowd) == 3 and gone not in crowd and 3 in crowd


def test_a_flood_from_one_address_never_costs_another_its_place():
    crowd, gone = crowd_of("honest", *["flood"] * 500, most=8)
    assert 0 in crowd and gone.count(None) == 8 and 0 not in gone


def test_whoever_left_by_itself_makes_room():
    crowd, _ = crowd_of("a", "a", most=2)
    crowd.leave(0)
    crowd.leave(0)
    assert crowd.enter(9, "a") is None and len(crowd) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("no address", "no address", True),
    ],
)
def test_an_ipv6_subscriber_counts_as_one_address(one, other, same):
    assert (neighbourhood(one) == neighbourhood(other)) is same
