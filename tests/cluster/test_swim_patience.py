"""How long the accused may prove that it lives: by who accuses it, by its own words, by what silence was proved to mean
lately. One core on a bench."""

from __future__ import annotations

import pytest

from ppsmoke.cluster.swim_packets import Gossip, MemberUpdate
from ppsmoke.cluster.swim_state import SECOND, Config, State
from tests.lab.lone_core import EPOCH, ME, LoneCore, alive, peer_id, suspect

SUSPECT, DEAD = State.SUSPECT, State.DEAD
QUIET = Config(probe_period=10_000 * SECOND)  # no probes of our own: what is said is all that happens
DOUBT_S = 1.5  # an accuser's doubt counts as suspicion


@pytest.mark.parametrize(
    ("peers", "accusers", "seconds"),
    [
        ("a", "", 30.0),
        ("ab", "", 30.0),
        ("ab", "b", 10.0),
        ("abc", "", 30.0),
        ("abc", "b", 17.381),
        ("abc", "bc", 10.0),
        ("abcd", "b", 20.0),
        ("abcd", "bcd", 10.0),
        ("abcd", "bbb", 20.0),  # one voice, however often it is heard, or whoever passes it on
    ],
)
def test_a_suspect_dies_after_the_time_that_its_accusers_leave_it(peers, accusers, seconds):
    lone = LoneCore(peers, config=QUIET)
    lone.pass_time(5).hear(peers[-1], Gossip(), MemberUpdate(SUSPECT, peer_id("a"), EPOCH, 0, peer_id("a")))
    for letter in accusers:
        lone.hear(peers[-1], Gossip(), suspect("a", letter))
    lone.pass_time(5 + seconds - DOUBT_S - 0.001)
    assert lone.state("a") is SUSPECT
    lone.pass_time(5 + seconds - DOUBT_S)
    assert lone.became("a")[-1] == (5 + seconds - DOUBT_S, DEAD)


def be_wrong(lone: LoneCore, who: str) -> None:
    """Somebody is accused, or we are, and lives."""
    if who == "me":
        lone.hear("b", Gossip(), MemberUpdate(SUSPECT, ME, EPOCH, 0, peer_id("b")))
    elif who == "me, asleep":
        lone.freeze(lone.now / SECOND + 3)
    else:
        lone.hear("b", Gossip(), suspect(who, "b")).hear("b", Gossip(), alive(who, 1))


@pytest.mark.parametrize("who", ["a", "c", "me", "me, asleep"])
def test_where_an_accusation_was_proved_wrong_everybody_gets_more_patience(who):
    lone = LoneCore("abc", config=QUIET).pass_time(5)
    be_wrong(lone, who)
    lone.pass_time(10)
    for accuser in "bc":
        lone.hear(accuser, Gossip(), suspect("a", accuser, 1))
    lone.pass_time(100)
    died, state = lone.became("a")[-1]
    # Two of three possible accusers: one confirmation of the two that are wanted, of 15 to 45 s.
    assert (round(died - 10, 3), state) == (26.072 - DOUBT_S, DEAD)


def test_patience_comes_in_time_for_those_under_suspicion_and_ends():
    lone = LoneCore("abc", config=QUIET).pass_time(5)
    for accuser in "bcd":
        lone.hear(accuser, Gossip(), suspect("a", accuser))
    be_wrong(lone.pass_time(5 + 10 - DOUBT_S - 0.1), "c")
    lone.pass_time(60)
    assert lone.became("a")[-1] == (5 + 15 - DOUBT_S, DEAD)
    lone.hear("a", Gossip(), alive("a", 1)).pass_time(700)
    for accuser in "bcd":
        lone.hear(accuser, Gossip(), suspect("a", accuser, 1))
    lone.pass_time(800)
    assert lone.became("a")[-1] == (700 + 10 - DOUBT_S, DEAD)


def test_a_sign_of_life_during_the_suspicion_postpones_the_verdict():
    lone = LoneCore("ab", config=QUIET).pass_time(5)
    lone.hear("b", Gossip(), suspect("a", "b"), suspect("a", "c"))
    lone.pass_time(12).hear("a", Gossip())
    lone.pass_time(12 + 9.99)
    assert lone.state("a") is SUSPECT
    lone.pass_time(12 + 10)
    assert lone.state("a") is DEAD
