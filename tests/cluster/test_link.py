"""Links over real sockets: who is let in, what ends a link, and that nothing a peer does ends the listener."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace

import pytest

from ppsmoke.cluster import link as link_module
from ppsmoke.cluster.addresses import Address, Endpoint
from ppsmoke.cluster.events import LinkDown, LinkUp
from ppsmoke.cluster.frames import FrameType, encode_frame
from ppsmoke.cluster.handshake import Bye, ByeReason, HelloRefused, LinkKind, Preamble, preamble_key
from ppsmoke.cluster.sockets import MAX_STRANGERS
from ppsmoke.errors import DeadlineExceeded, LinkError, LinkLost
from ppsmoke.waiting import Deadline
from tests.lab.cluster import IMPATIENT, endpoint_of, endpoints_of, lab, next_event, run, until, within
from tests.lab.honest import AUTHORITY, CLUSTER_KEY, identity_on_side, still_welcomes
from tests.lab.raw_peer import RawPeer


async def failed_dial(node, endpoint: Endpoint) -> None:
    """Dial until the first attempt has failed; the node goes on trying."""
    dialling = asyncio.ensure_future(node.dial(endpoint))
    await until(lambda: endpoint.node_id in node._roster.peers and node._roster.peers[endpoint.node_id].last_error)
    dialling.cancel()
    await asyncio.wait({dialling})


async def drain(sock_reader: asyncio.StreamReader) -> bytes:
    try:
        return await within(sock_reader.read(), "the end of a refused connection")
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("opening", "counter"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64), "door.wrong-preamble"),
        (bytes(64), "door.wrong-preamble"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".ljust(200, b"\x00"), "door.wrong-preamble"),
        (Preamble(LinkKind.DIRECT, "0" * 16, "f" * 16, bytes(16)).seal(preamble_key(b"x" * 32)), "door.wrong-preamble"),
        (Preamble(LinkKind.DIRECT, "0" * 16, "f" * 16, bytes(16)).seal(preamble_key(CLUSTER_KEY)), "door.wrong-target"),
    ],
    ids=["http", "zeros", "tls", "other key", "other target"],
)
def test_a_stranger_is_dropped_without_a_byte_and_the_listener_lives_on(opening, counter):
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            reader, writer = await asyncio.open_connection("127.0.0.1", node.tcp_port)
            writer.write(opening)
            assert await drain(reader) == b""
            writer.close()
            await until(lambda: node.counters()[counter] == node.counts["strangers"] == 1)
            await still_welcomes(cluster, node)

    run(scenario())


def test_a_flood_of_silent_strangers_costs_the_oldest_its_place_and_nobody_else():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            writers = []
            for _ in range(MAX_STRANGERS + 10):
                _, writer = await asyncio.open_connection("127.0.0.1", node.tcp_port)
                writers.append(writer)
            await until(lambda: node.counters()["door.evicted"] >= 10)
            await still_welcomes(cluster, node)
            for writer in writers:
                writer.close()

    run(scenario())


def test_a_stranger_that_says_nothing_is_dropped_after_the_handshakes_time():
    async def scenario():
        async with lab(timing=replace(IMPATIENT, handshake_s=0.1)) as cluster:
            node = await cluster.node("orchestrator")
            reader, writer = await asyncio.open_connection("127.0.0.1", node.tcp_port)
            assert await drain(reader) == b""
            writer.close()
            await until(lambda: node.counters()["door.too-slow"] == 1)
            await still_welcomes(cluster, node)

    run(scenario())


def test_a_wrong_cluster_key_is_named_as_a_likely_cause():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            stage = await cluster.node("stage-0-of-2", cluster_key=b"w" * 32)
            node = await cluster.node("orchestrator")
            await failed_dial(node, endpoint_of(stage))
            with pytest.raises(DeadlineExceeded) as caught:
                await node.gather(endpoints_of(stage), size=2, deadline=Deadline.after(0.1, phase="gather"))
            assert "stage-0-of-2" in caught.value.cause and "another cluster key" in caught.value.cause

    run(scenario())


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("code_hash", "this side runs code c0dec0dec0de.., stage-0-of-2 runs 0therc0de"),
        ("model", "this side expects model 30de130de130.., stage-0-of-2 has 0therc0de"),
    ],
)
@pytest.mark.parametrize("side", ["server", "client"])
def test_hellos_that_do_not_fit_end_gathering_at_once_and_name_both_sides(option, text, side):
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = identity_on_side(side, node.node_id)
            stage = await cluster.node("stage-0-of-2", identity=identity, **{option: "0therc0de"})
            with pytest.raises(HelloRefused, match=text):
                await node.gather(endpoints_of(stage), size=2, deadline=Deadline.after(20.0))
            assert not stage.links()

    run(scenario())


def test_gathering_ends_as_well_when_the_misfit_dials_us():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            stage = await cluster.node("stage-0-of-2", code_hash="0therc0de")
            gathering = asyncio.ensure_future(
                node.gather(endpoints_of(), size=2, deadline=Deadline.after(20.0, phase="gather"))
            )
            with pytest.raises(HelloRefused, match="this side runs code 0therc0de, orchestrator runs c0dec0dec0de"):
                await within(stage.dial(endpoint_of(node)))
            with pytest.raises(HelloRefused, match="stage-0-of-2 runs 0therc0de"):
                await within(gathering)

    run(scenario())


BROKEN = [
    (struct.pack("!IBBHQ", 0, 99, 0, 0, 0), "unknown type 99", "link.bad-frame"),
    (struct.pack("!IBBHQ", 1 << 31, 5, 3, 0, 1), "claims 2,147,483,648 bytes", "link.bad-frame"),
    (struct.pack("!IBBHQ", 0, 3, 9, 0, 0), "unknown flags", "link.bad-frame"),
    (encode_frame(FrameType.READY), "READY frame on a link that is up", "link.bad-frame"),
    (encode_frame(FrameType.DATA, flags=3, sequence=2, payload=b"x"), "chunk 2 after chunk 0", "link.bad-data"),
    (encode_frame(FrameType.ACK, sequence=1), "never sent", "link.bad-ack"),
    (encode_frame(FrameType.BYE), "BYE without a reason", "link.bad-frame"),
    (encode_frame(FrameType.SIGNAL, payload=b"\x63"), "a signal of unknown kind", "link.bad-signal"),
    (encode_frame(FrameType.CARRY, payload=b"short"), "without a source and a target", "link.bad-carry"),
]


@pytest.mark.parametrize(("data", "says", "counter"), BROKEN, ids=[says for _, says, _ in BROKEN])
def test_a_frame_that_is_none_of_ours_closes_the_link_with_a_reason_and_nothing_else(data, says, counter):
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            events = node.subscribe()
            peer = await within(RawPeer.linked(node, AUTHORITY.mint("stage-0-of-2"), CLUSTER_KEY))
            await next_event(events, LinkUp)
            peer.write(data)
            bye = Bye.decode((await within(peer.expect(FrameType.BYE))).payload)
            assert bye.reason is ByeReason.BROKEN and says in bye.text
            down = await next_event(events, LinkDown)
            assert says in down.reason and node.counters()[counter] == 1
            await peer.close()
            await still_welcomes(cluster, node)

    run(scenario())


@pytest.mark.parametrize("kind", [FrameType.DATA, FrameType.PING, FrameType.READY, FrameType.ACK])
def test_before_hello_nothing_else_is_taken(kind):
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            peer = await within(RawPeer.dial(node, identity, CLUSTER_KEY))
            peer.write(encode_frame(kind, flags=0, sequence=1))
            bye = Bye.decode((await within(peer.expect(FrameType.BYE))).payload)
            assert f"a {kind.name} frame in state hello" in bye.text
            await peer.close()
            await until(lambda: node.counters()["handshake.bad-frame"] == 1)
            await still_welcomes(cluster, node)

    run(scenario())


def test_a_silent_peer_is_pinged_and_then_given_up_with_a_reason():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            events = node.subscribe()
            peer = await within(RawPeer.linked(node, AUTHORITY.mint("stage-0-of-2"), CLUSTER_KEY))
            first = await within(peer.expect(FrameType.PING))  # on coming up; not answered
            assert (await within(peer.expect(FrameType.PING))).sequence == first.sequence + 1
            down = await next_event(events, LinkDown)
            assert down.reason == "no byte from stage-0-of-2 for 0.3 s"
            await peer.close()

    run(scenario())


def test_a_peer_that_answers_pings_keeps_its_link_and_the_round_trip_is_known():
    async def scenario():
        async with lab(timing=replace(IMPATIENT, down_after_s=0.5)) as cluster:
            node = await cluster.node("orchestrator")
            peer = await within(RawPeer.linked(node, AUTHORITY.mint("stage-0-of-2"), CLUSTER_KEY))
            for _ in range(8):  # longer than the silence that would end it
                ping = await within(peer.expect(FrameType.PING))
                peer.write(encode_frame(FrameType.PONG, sequence=ping.sequence))
            (link,) = node.links()
            assert link.role == "stage-0-of-2" and link.path == "direct" and 0 < link.rtt_ms < 1000
            await peer.close()
            await until(lambda: not node.links())

    run(scenario())


def test_both_sides_learn_the_reason_of_a_bye_and_a_node_that_left_is_not_dialled_again():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            events = node.subscribe()
            async with cluster.listening("stage-0-of-2") as stage:
                await within(node.dial(endpoint_of(stage)))
            await next_event(events, LinkUp)
            down = await next_event(events, LinkDown)
            assert down == LinkDown(stage.node_id, "stage-0-of-2", "stage-0-of-2 said: its node has ended")
            with pytest.raises(LinkLost, match="has left: its node has ended"):
                await within(node.send(stage.address("box"), b"too late"))

    run(scenario())


def test_a_port_that_is_taken_is_one_clear_error():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            with pytest.raises(LinkError, match=f"cannot listen on 127.0.0.1:{node.tcp_port}"):
                await cluster.node("stage-0-of-2", tcp=("127.0.0.1", node.tcp_port))
            other = await cluster.node("stage-1-of-2", udp=("127.0.0.1", 0))
            with pytest.raises(LinkError, match=f"cannot listen on UDP 127.0.0.1:{other.udp_port}"):
                await cluster.node("stage-0-of-2", udp=("127.0.0.1", other.udp_port))

    run(scenario())


def test_a_port_where_nobody_listens_is_named_when_gathering_runs_out_of_time():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            nobody = Endpoint("stage-0-of-2", 0, AUTHORITY.mint("stage-0-of-2").node_id, "127.0.0.1", 1, None)

            async def endpoints():
                yield nobody

            await failed_dial(node, nobody)
            with pytest.raises(DeadlineExceeded) as caught:
                await node.gather(endpoints(), size=3, deadline=Deadline.after(0.1, phase="gather"))
            text = caught.value.cause
            assert "1 of 3 there" in text and "1 not known yet" in text
            assert "stage-0-of-2: 127.0.0.1:1: Connection refused" in text

    run(scenario())


def test_a_link_that_has_carried_a_large_message_is_kept_from_idling_for_a_while(monkeypatch):
    monkeypatch.setattr(link_module, "FILLER_EVERY_S", 0.02)
    monkeypatch.setattr(link_module, "WARM_S", 0.3)

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            link = node._roster.peers[identity.node_id].link
            assert link._filler is None  # nothing was carried yet
            await within(node.send(Address(identity.node_id, "box"), b"data"))
            await within(peer.expect(FrameType.DATA))
            assert link._filler is None  # what fits into an idle connection's window needs none
            await within(node.send(Address(identity.node_id, "box"), bytes(16 << 10)))
            fillers = [await within(peer.expect(FrameType.FILLER)) for _ in range(5)]
            assert {len(filler.payload) for filler in fillers} == {48}  # 64 with the header
            await until(lambda: link._filler is None, doing="the last filler")
            await peer.close()

    run(scenario())
