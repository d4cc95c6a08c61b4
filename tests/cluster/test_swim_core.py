"""The rules, one core on a bench: who is believed, what is answered to whom."""

from __future__ import annotations

import pytest

from ppsmoke.cluster.swim import MAX_INCARNATION
from ppsmoke.cluster.swim_packets import Ack, ForwardedAck, Gossip, MemberUpdate, Nack, Ping, PingRequest, Stale, Sync
from ppsmoke.cluster.swim_state import (
    SECOND,
    Config,
    EpochRaised,
    NameLost,
    Refuted,
    State,
    UdpBlocked,
    UdpRestored,
    Woke,
)
from tests.lab.lone_core import EPOCH, ME, LoneCore, alive, dead, peer_id, suspect

ALIVE, SUSPECT, DEAD, LEFT = State
QUIET = Config(probe_period=10_000 * SECOND)  # no probes of our own: what is said is all that happens
DOUBT_S = 1.5  # an accuser's doubt counts as suspicion


def left(letter: str, incarnation: int = 0) -> MemberUpdate:
    return MemberUpdate(LEFT, peer_id(letter), EPOCH, incarnation, peer_id(letter))


def accused(state: State, by: str, incarnation: int = 0, *, epoch: int = EPOCH) -> MemberUpdate:
    return MemberUpdate(state, ME, epoch, incarnation, peer_id(by))


@pytest.mark.parametrize(
    ("claims", "outcome"),
    [
        ([suspect("a", "b")], SUSPECT),
        ([suspect("a", "b"), alive("a")], SUSPECT),  # the old alive refutes nothing
        ([suspect("a", "b"), alive("a", 1)], ALIVE),
        ([suspect("a", "b", 1), alive("a", 1)], SUSPECT),
        ([alive("a", 2), suspect("a", "b", 1)], ALIVE),
        ([dead("a", "b"), alive("a")], DEAD),
        ([dead("a", "b"), suspect("a", "c")], DEAD),
        ([dead("a", "b"), alive("a", 1)], ALIVE),
        ([dead("a", "b", 5), alive("a", 3)], DEAD),  # evidence is monotone: a late low alive is no resurrection
        ([dead("a", "b", 5), alive("a", 0, epoch=EPOCH + 1)], ALIVE),  # a new life wins at once
        ([alive("a", 0, epoch=EPOCH + 1), dead("a", "b", 99)], ALIVE),
        ([dead("a", "b"), left("a")], LEFT),
        ([left("a"), dead("a", "b")], LEFT),
        ([left("a"), alive("a")], LEFT),
        ([left("a"), alive("a", 0, epoch=EPOCH + 1)], ALIVE),
        ([suspect("a", "b", 0, epoch=EPOCH - 1)], ALIVE),
    ],
)
def test_of_two_claims_the_later_life_then_the_incarnation_then_the_graver_state_wins(claims, outcome):
    lone = LoneCore("b", config=QUIET)
    lone.hear("b", Gossip(), alive("a"))
    lone.pass_time(3)
    for claim in claims:
        lone.hear("b", Gossip(), claim)
    assert lone.state("a") is outcome


def test_whom_we_have_just_heard_is_at_most_suspect_whatever_others_say():
    lone = LoneCore("ab", config=QUIET).pass_time(10)
    lone.hear("a", Gossip()).pass_time(11).hear("b", Gossip(), dead("a", "b"))
    assert lone.state("a") is SUSPECT
    lone.hear("b", Gossip(), alive("a", 1))
    lone.pass_time(20).hear("b", Gossip(), dead("a", "b", 1))
    assert lone.state("a") is DEAD


def test_the_dead_of_a_whole_view_arrive_as_suspects():
    lone = LoneCore("ab", config=QUIET).pass_time(10)
    lone.hear("b", Sync(1, False), dead("a", "b"), dead("x", "b"))
    assert (lone.state("a"), lone.state("x")) == (SUSPECT, SUSPECT)


@pytest.mark.parametrize("claim", [suspect("x", "b"), dead("x", "b")])
def test_a_claim_about_a_stranger_is_remembered_and_passed_on(claim):
    lone = LoneCore("ab", config=QUIET).pass_time(3)
    lone.hear("b", Gossip(), claim).pass_time(4)
    assert lone.state("x") is claim.state
    assert claim in lone.told("a")


@pytest.mark.parametrize(
    ("claim", "incarnation"),
    [
        (accused(SUSPECT, "a", 0), 1),
        (accused(SUSPECT, "a", 7), 8),
        (accused(DEAD, "a", 0), 1),
        (accused(LEFT, "a", 0), 1),
        (accused(SUSPECT, "a", 0, epoch=EPOCH - 1), 0),  # our former identity
        (accused(DEAD, "a", 99, epoch=EPOCH - 1), 0),
        (accused(ALIVE, "a", 0), 0),
        (accused(ALIVE, "a", 3), 4),  # nobody else raises our incarnation
    ],
)
def test_only_claims_about_our_present_or_a_later_incarnation_are_refuted(claim, incarnation):
    lone = LoneCore("ab", config=QUIET).pass_time(3)
    lone.hear("a", Gossip(), claim).hear("a", Gossip(), claim).pass_time(4)
    assert lone.core.incarnation == incarnation
    assert len(lone.of(Refuted)) == (1 if incarnation else 0), "the same claim is refuted once"
    assert any(getattr(u, "incarnation", 0) == incarnation > 0 for u in lone.told("b")) is (incarnation > 0)


def test_refuting_at_the_last_incarnation_begins_a_new_life():
    lone = LoneCore("a", config=QUIET).hear("a", Gossip(), accused(SUSPECT, "a", MAX_INCARNATION))
    assert (lone.core.epoch, lone.core.incarnation) == (EPOCH + 1, 0)


def test_a_life_of_ours_after_this_one_is_continued_above():
    lone = LoneCore("a", config=QUIET)
    lone.perform(lone.core.register(lone.now, "pp-entry", b"stage"))
    lone.hear("a", Gossip(), accused(SUSPECT, "a", 3, epoch=EPOCH + 500))
    assert lone.of(EpochRaised) == [EpochRaised(EPOCH + 501)]
    assert [e.owner_epoch for e in lone.core.lookup("pp-entry")] == [EPOCH + 501]
    lone.hear("a", Stale(EPOCH + 501, EPOCH + 900))
    assert lone.core.epoch == EPOCH + 901
    lone.hear("a", Stale(EPOCH, EPOCH + 5000))  # answers what our former life said
    assert lone.core.epoch == EPOCH + 901


@pytest.mark.parametrize("epoch", [EPOCH + 10**13, 2**64 - 1])
def test_a_life_in_the_far_future_is_a_lie(epoch):
    lone = LoneCore("a", config=QUIET)
    lone.hear("a", Gossip(), accused(SUSPECT, "a", epoch=epoch), alive("x", epoch=epoch)).hear("a", Stale(EPOCH, epoch))
    assert (lone.core.epoch, lone.state("x")) == (EPOCH, None)
    assert lone.core.counts["implausible-epoch"] == 3


def test_a_peer_that_speaks_from_a_former_life_is_told_of_the_later_one_once_a_second():
    lone = LoneCore("a", config=QUIET).pass_time(5)
    for _ in range(20):
        lone.hear("a", Ping(1, 0, bytes(8)), alive("a", 9, epoch=EPOCH - 7), epoch=EPOCH - 7)
    assert [body for _, body in lone.sent_to("a", Stale)] == [Stale(EPOCH - 7, EPOCH)]
    assert lone.core.counts["former-life"] == 20 and lone.sent_to("a", Ack) == []


@pytest.mark.parametrize("state", [SUSPECT, DEAD])
def test_who_does_not_know_that_it_is_accused_is_told_at_its_next_word(state):
    lone = LoneCore("ab", config=QUIET).pass_time(5)
    claim = MemberUpdate(state, peer_id("a"), EPOCH, 0, peer_id("b"))
    lone.hear("b", Gossip(), claim).pass_time(100)
    lone.sent.clear()
    for _ in range(5):
        lone.hear("a", Gossip())
    told = [u for u in lone.told("a") if u.node_id == peer_id("a")]
    assert len(told) == 1 and told[0].state in (SUSPECT, DEAD), "one answer a second, no flood"
    lone.hear("a", Ping(1, 0, bytes(8)))
    assert len([u for u in lone.told("a") if u.node_id == peer_id("a")]) == 2, "and with every ack"


def test_a_stranger_is_asked_who_it_is_and_answered_meanwhile():
    lone = LoneCore(config=QUIET).hear("s", Ping(9, 0, bytes(8)))
    assert [body.seq for _, body in lone.sent_to("s", Ack)] == [9]
    assert [body.wants_reply for _, body in lone.sent_to("s", Sync)] == [True]


def test_every_part_of_a_view_fits_a_datagram_and_asks_for_one_reply():
    lone = LoneCore(config=QUIET)
    for number in range(100):
        member = MemberUpdate(ALIVE, f"{number:016x}", EPOCH, 0, meta=bytes(100))
        lone.hear("a", Gossip(), member)
    lone.sent.clear()
    lone.hear("a", Sync(5, True)).hear("a", Sync(5, True))
    parts = [packet for _, _, packet, _ in lone.sent if packet.body == Sync(5, False)]
    assert len(parts) > 5 and sum(len(part.updates) for part in parts) == 101


def test_our_own_packets_coming_back_are_dropped():
    lone = LoneCore(config=QUIET)
    lone.perform(lone.core.on_datagram(0, ME, EPOCH, b"", via="udp"))
    assert lone.core.counts == {"own-echo": 1} and lone.sent == []


@pytest.mark.parametrize(
    ("asked", "answer"), [(ME, ForwardedAck(7, ME)), (peer_id("z"), Nack(7)), (peer_id("b"), None)]
)
def test_a_helper_answers_for_itself_says_no_for_strangers_and_pings_the_rest(asked, answer):
    lone = LoneCore("ab", config=QUIET)
    lone.sent.clear()
    lone.hear("a", PingRequest(7, asked, 300))
    bodies = [packet.body for _, to, packet, _ in lone.sent if to == peer_id("a")]
    assert bodies == ([answer] if answer else [])
    assert bool(lone.sent_to("b", Ping)) is (answer is None)


@pytest.mark.parametrize(("answers", "expected"), [(True, ForwardedAck(7, peer_id("b"))), (False, Nack(7))])
def test_a_helper_passes_the_answer_on_or_says_that_there_is_none(answers, expected):
    lone = LoneCore("ab", config=QUIET)
    lone.sent.clear()
    lone.hear("a", PingRequest(7, peer_id("b"), 300))
    if answers:
        lone.hear("b", Ack(lone.sent_to("b", Ping)[0][1].seq, bytes(8)))
    lone.pass_time(0.3)
    assert expected in [packet.body for _, to, packet, _ in lone.sent if to == peer_id("a")]


def test_an_unanswered_probe_asks_helpers_and_the_link_and_then_accuses():
    lone = LoneCore("abcd")
    lone.perform(lone.core.on_link(0, peer_id("a"), up=True, epoch=EPOCH))
    lone.sent.clear()
    lone.pass_time(20)
    first_at, first = lone.sent_to("a", Ping)[0]
    requests = [(at, p.body) for at, _, p, _ in lone.sent if p.body == PingRequest(first.seq, peer_id("a"), 2400)]
    by_link = [at for at, to, p, via in lone.sent if getattr(p.body, "seq", 0) == first.seq and via == "link"]
    assert [round(at - first_at, 6) for at, _ in requests] == [3.0] * 3, "nothing is measured yet: 3 s"
    assert [round(at - first_at, 6) for at in by_link] == [3.0]
    assert lone.became("a")[-1] == (pytest.approx(first_at + 9 + DOUBT_S), SUSPECT)


def test_a_nack_says_that_the_fault_is_not_ours():
    def health_after(nacks: int) -> int:
        lone = LoneCore("abc")
        while not lone.of(type(None)) and lone.core.health == 0 and lone.now < 15 * SECOND:
            lone.pass_time(lone.now / SECOND + 0.1)
            for _, to, packet, _ in lone.sent:
                if isinstance(packet.body, PingRequest) and nacks:
                    for _ in range(nacks):
                        lone.hear(chr(int(to, 16)), Nack(packet.body.seq))
            lone.sent.clear()
        return lone.core.health

    assert health_after(0) == 2 and health_after(2) == 0


def test_our_own_freeze_is_not_held_against_others():
    lone = LoneCore("ab").pass_time(2)
    lone.hear("b", Gossip(), suspect("a", "b"), suspect("a", "c"))
    lone.pass_time(3).freeze(60)
    assert lone.of(Woke)[0].frozen > 56 * SECOND
    assert DEAD not in [state for _, state in lone.became("a")]
    assert lone.core.incarnation == 1 and {to for at, to, *_ in lone.sent if at == 60.0} == {peer_id("a"), peer_id("b")}
    lone.pass_time(60 + 2 - 1 + 15 - DOUBT_S - 2)
    assert DEAD not in [state for _, state in lone.became("a")]
    lone.pass_time(75)
    assert lone.state("a") is DEAD, "but the time before it counts"


def test_a_clock_that_jumps_back_stands_still():
    lone = LoneCore("a").pass_time(5)
    before = lone.core.own_time
    lone.perform(lone.core.on_datagram(0, peer_id("a"), EPOCH, b"", via="udp"))
    assert lone.core.own_time == before > 0


def answer_pings(lone: LoneCore, seconds: int, *, via: str, hears_udp: bool) -> None:
    """The peer answers what reaches it by this way, at once."""
    for _ in range(seconds * 10):
        lone.pass_time(lone.now / SECOND + 0.1)
        arrived = [p.body.seq for _, _, p, way in lone.sent if isinstance(p.body, Ping) and way == via]
        lone.sent.clear()
        for seq in arrived:
            lone.hear("a", Ack(seq, bytes(8)), via=via, hears_udp=hears_udp)


@pytest.mark.parametrize(("hears_us", "direction"), [(False, "both"), (True, "from")])
def test_blocked_udp_is_said_once_with_its_direction_and_membership_goes_on_over_the_link(hears_us, direction):
    lone = LoneCore()
    lone.perform(lone.core.on_link(0, peer_id("a"), up=True, epoch=EPOCH))
    answer_pings(lone, 60, via="link", hears_udp=hears_us)
    assert [event for _, event in lone.events if isinstance(event, UdpBlocked)] == [UdpBlocked(peer_id("a"), direction)]
    assert [state for _, state in lone.became("a")] == [ALIVE] and lone.core.health == 0
    answer_pings(lone, 5, via="udp", hears_udp=True)
    assert len(lone.of(UdpRestored)) == 1


def test_leaving_tells_everybody_and_still_answers():
    lone = LoneCore("abc")
    lone.sent.clear()
    lone.perform(lone.core.leave(lone.now))
    for letter in "abc":
        assert lone.told(letter)[0][:4] == (LEFT, ME, EPOCH, 0)
    lone.hear("a", Ping(3, 0, bytes(8)), accused(LEFT, "a"))
    assert lone.sent_to("a", Ack) and lone.core.incarnation == 0
    lone.sent.clear()
    lone.pass_time(30)
    assert not [packet for *_, packet, _ in lone.sent if isinstance(packet.body, Ping)]


def test_who_left_is_asked_now_and_then_whether_it_is_back_and_welcomed_in_its_new_life():
    lone = LoneCore("ab", config=QUIET).hear("a", Gossip(), left("a"))
    lone.sent.clear()
    lone.pass_time(20)
    pings = [ping for _, ping in lone.sent_to("a", Ping)]
    assert len(pings) == 4 and lone.state("a") is LEFT, "nothing is concluded from its silence"
    lone.hear("a", Ack(pings[-1].seq, bytes(8)), epoch=EPOCH + 1)
    assert [body.wants_reply for _, body in lone.sent_to("a", Sync)] == [True]
    lone.hear("a", Sync(1, False), alive("a", epoch=EPOCH + 1), epoch=EPOCH + 1)
    assert lone.state("a") is ALIVE


def test_losing_a_name_to_a_later_generation_is_an_event_and_erases_nothing():
    lone = LoneCore("a", config=QUIET)
    lone.perform(lone.core.register(lone.now, "pp-stage-0", b"mine", generation=1))
    mine = lone.core.lookup("pp-stage-0")[0]
    theirs = mine._replace(owner=peer_id("a"), owner_epoch=EPOCH, generation=2)
    lone.hear("a", Gossip(), theirs, theirs)
    assert lone.of(NameLost) == [NameLost("pp-stage-0", peer_id("a"), 2)]
    assert lone.core.lookup("pp-stage-0") == [theirs, mine]


def test_nobody_else_writes_our_names():
    lone = LoneCore("a", config=QUIET)
    lone.perform(lone.core.register(lone.now, "pp-entry", b"mine"))
    mine = lone.core.lookup("pp-entry")[0]
    lone.hear("a", Gossip(), mine._replace(version=8, value=b"forged"), mine._replace(name="never", version=8))
    assert lone.core.lookup("pp-entry") == [mine._replace(version=9)] and lone.core.lookup("never") == []
    lone.hear("a", Gossip(), mine._replace(version=2**32 - 1, value=b"forged"))
    assert lone.core.lookup("pp-entry") == [mine._replace(owner_epoch=EPOCH + 1)], "no version is left: a new life"


def test_a_name_survives_the_false_death_of_its_owner():
    lone = LoneCore("ab", config=QUIET).pass_time(5)
    lone.perform(lone.core.register(lone.now, "x", b""))
    entry = lone.core.lookup("x")[0]._replace(name="pp-exit", owner=peer_id("a"))
    lone.hear("a", Gossip(), entry).pass_time(10)
    lone.hear("b", Gossip(), dead("a", "b"))
    assert lone.state("a") is DEAD and lone.core.lookup("pp-exit") == []
    lone.sent.clear()
    lone.hear("b", Gossip(), alive("a", 1)).pass_time(11)
    assert lone.core.lookup("pp-exit") == [entry] and entry in lone.told("b"), "found again, and told again"


def test_the_member_table_is_bounded_and_the_longest_dead_make_room():
    config = Config(probe_period=10_000 * SECOND, max_members=3)
    lone = LoneCore("abc", config=config).pass_time(3)
    lone.hear("a", Gossip(), alive("d"))
    assert lone.state("d") is None and lone.core.counts["too-many-members"] == 1
    lone.hear("a", Gossip(), dead("b", "a"), alive("d"))
    assert (lone.state("b"), lone.state("d")) == (None, ALIVE)


def test_rounds_that_a_liar_makes_jump_starve_nobody_and_speed_nothing_up():
    lone = LoneCore("abc")
    lone.pass_time(3)
    lone.sent.clear()
    for step in range(600):
        lone.hear("a", Ping(0, (step * 3) % 2**32, bytes(8)))
        for letter in "abc":
            for _, ping in lone.sent_to(letter, Ping):
                lone.hear(letter, Ack(ping.seq, bytes(8)))
        probes = [(at, to) for at, to, p, _ in lone.sent if isinstance(p.body, Ping)]
        lone.sent = [entry for entry in lone.sent if not isinstance(entry[2].body, Ping)]
        lone.probed = [*getattr(lone, "probed", []), *probes]
        lone.pass_time(3 + step * 0.1)
    assert {to for _, to in lone.probed} == {peer_id(letter) for letter in "abc"}
    assert len(lone.probed) <= 60 / 0.75 + 2
