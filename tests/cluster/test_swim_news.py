"""Which way news goes, so that the accused hears of its accusation: one core on a bench."""

from __future__ import annotations

from ppsmoke.cluster.swim_packets import Ack, ForwardedAck, Gossip, Ping, PingRequest
from ppsmoke.cluster.swim_state import SECOND, State
from tests.lab.lone_core import EPOCH, LoneCore, alive, peer_id, suspect


def test_whom_only_helpers_reach_hears_through_them_of_what_it_is_accused():
    lone = LoneCore("abc")
    lone.hear("b", Gossip(), suspect("a", "b")).pass_time(8)
    (seq,) = {
        p.body.seq for _, _, p, _ in lone.sent if isinstance(p.body, PingRequest) and p.body.target == peer_id("a")
    }
    lone.sent.clear()
    lone.pass_time(8.5)
    assert lone.told("c") == [], "it has been told often enough, and perhaps in vain"
    lone.hear("c", ForwardedAck(seq, peer_id("a"))).pass_time(9)
    assert suspect("a", "b") in [update._replace(meta=b"") for update in lone.told("c")]
    assert lone.state("a") is State.SUSPECT, "and it alone can refute that"


def test_what_is_told_once_goes_over_the_link_until_a_datagram_has_been_answered():
    lone = LoneCore("ab")
    lone.perform(lone.core.on_link(0, peer_id("a"), up=True, epoch=EPOCH))
    lone.pass_time(2)

    def way_of_news(incarnation: int) -> set[str]:
        lone.sent.clear()
        lone.hear("b", Gossip(), alive("b", incarnation)).pass_time(lone.now / SECOND + 0.5)
        return {via for _, to, packet, via in lone.sent if to == peer_id("a") and isinstance(packet.body, Gossip)}

    ping = lone.sent_to("a", Ping)[0][1]
    assert way_of_news(1) == {"link"}
    lone.hear("a", Ack(ping.seq, bytes(8)), via="udp")
    assert way_of_news(2) == {"udp"}
