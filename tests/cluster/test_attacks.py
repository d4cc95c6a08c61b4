"""Attacks on whole nodes: on the way, by datagrams, and by a member that lies. Each has its control beside it, in which
the same path works with the right bytes, and ends with the counter that rose. `python -m tests.lab.attacks` lists all.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import struct
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ppsmoke.cluster import link as link_module
from ppsmoke.cluster import mailbox as mailbox_module
from ppsmoke.cluster import session as session_module
from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.events import LinkDown
from ppsmoke.cluster.frames import MAX_PAYLOAD_BYTES, FrameFlags, FrameType, encode_frame
from ppsmoke.cluster.handshake import PREAMBLE_BYTES, LinkKind, Preamble, preamble_key
from ppsmoke.cluster.mailbox import MAX_UNASKED_OF_ONE, UNASKED_BYTES
from ppsmoke.cluster.names import NameEntry
from ppsmoke.cluster.node import Node
from ppsmoke.cluster.seal import Sealer
from ppsmoke.cluster.session import MAX_MESSAGE_BYTES
from ppsmoke.cluster.signals import Connect, Token, encode_signal
from ppsmoke.cluster.swim_packets import Gossip, MemberUpdate, Packet, encode
from ppsmoke.cluster.swim_state import State
from tests.lab.cluster import IMPATIENT, endpoint_of, lab, next_event, receive_all, run, until, within
from tests.lab.hidden import hidden
from tests.lab.honest import AUTHORITY, CLUSTER_KEY, still_welcomes
from tests.lab.meddler import Meddler
from tests.lab.raw_peer import RawPeer

UDP = ("127.0.0.1", 0)
PATIENT = replace(IMPATIENT, ping_after_s=5.0, down_after_s=15.0, redial_most_s=0.02)


def message_frames(mailbox: str, payload: bytes, *, first: int = 1, total: int | None = None) -> bytes:
    """DATA frames of one message, numbered from `first`; total: what its head says it has."""
    head = struct.pack("!IB", len(payload) if total is None else total, len(mailbox)) + mailbox.encode()
    flags = FrameFlags.FIRST if total is not None else FrameFlags.FIRST | FrameFlags.LAST
    return encode_frame(FrameType.DATA, flags=flags, sequence=first, payload=head + payload)


# --- on the way


@pytest.mark.slow
def test_a_preamble_with_any_byte_changed_opens_no_door():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            preamble = Preamble(LinkKind.DIRECT, identity.node_id, node.node_id, secrets.token_bytes(16))
            sealed = preamble.seal(preamble_key(CLUSTER_KEY))
            for at in range(PREAMBLE_BYTES):
                reader, writer = await asyncio.open_connection("127.0.0.1", node.tcp_port)
                writer.write(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
                assert await within(reader.read()) == b""
                writer.close()
            await until(lambda: node.counters()["door.wrong-preamble"] == PREAMBLE_BYTES)
            honest = await within(RawPeer.linked(node, identity, CLUSTER_KEY))  # the control: unchanged, it does
            await honest.close()

    run(scenario())


def test_a_preamble_that_was_overheard_opens_no_door_a_second_time():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))  # the control: the first time it does
            reader, writer = await asyncio.open_connection("127.0.0.1", node.tcp_port)
            writer.write(peer.preamble.seal(preamble_key(CLUSTER_KEY)))
            assert await within(reader.read()) == b""
            writer.close()
            await until(lambda: node.counters()["door.replayed"] == 1)
            assert [link.role for link in node.links()] == ["stage-0-of-2"]
            await peer.close()

    run(scenario())


async def meddled(deed: str, places: range, counter: str) -> None:
    """A message during which each of these bytes of the stream is meddled with arrives once, later, as it was."""
    async with lab(timing=PATIENT, udp=UDP) as cluster:
        sender = await hidden(cluster, "orchestrator")  # else it would be dialled, around whoever sits on the way
        receiver = await hidden(cluster, "stage-0-of-2")
        async with Meddler.before(receiver) as meddler:
            await within(sender.dial(meddler.endpoint))
            await within(sender.send(receiver.address("box"), b"control"))
            assert await receive_all(receiver, "box", 1) == [b"control"]
            events = receiver.subscribe()
            for number, at in enumerate(places, start=1):
                await until(lambda: sender.links() and receiver.links())
                meddler.arm(deed, at=at)
                # What follows completes a record whose length was changed.
                messages = [b"message %d" % at, bytes(70_000)]
                for message in messages:
                    await within(sender.send(receiver.address("box"), message))
                await next_event(events, LinkDown)
                assert await receive_all(receiver, "box", 2) == messages
                assert meddler.done == number and receiver.counters()[counter] == number
        assert not len(receiver.mailbox("box"))


# A TLS record with a DATA frame of 26 bytes at least: 5 of header, 16 of the frame's, the payload, 17 of TLS.
RECORD = range(5 + 16 + 26 + 17)


@pytest.mark.parametrize("places", [range(0, 64, 21), pytest.param(RECORD, marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_record_with_any_byte_changed_ends_the_link_and_harms_no_message(places):
    run(meddled("flip", places, "link.tampered"))


@pytest.mark.parametrize("places", [range(5, 64, 29), pytest.param(RECORD[::3], marks=pytest.mark.slow)])
def test_a_stream_cut_anywhere_ends_the_link_and_harms_no_message(places):
    run(meddled("cut", places, "link.cut"))


@pytest.mark.slow
def test_a_handshake_with_a_byte_changed_makes_no_link_or_the_right_one():
    """Preamble, TLS, HELLO and READY in one direction; what TLS does not look at (a record's version) harms nothing."""

    async def scenario():
        async with lab(timing=PATIENT) as cluster:
            sender = await hidden(cluster, "orchestrator")
            receiver = await hidden(cluster, "stage-0-of-2")
            async with Meddler.before(receiver) as meddler:
                await within(sender.dial(meddler.endpoint))
                places = range(0, 1200, 83)
                for number, at in enumerate(places, start=1):
                    await until(lambda: sender.links() and receiver.links())
                    meddler.arm("flip", at=at)
                    sender._roster.peers[receiver.node_id].link.abort()
                    await within(sender.send(receiver.address("box"), b"message %d" % at))
                    assert await receive_all(receiver, "box", 1) == [b"message %d" % at]
                    assert meddler.done == number
            where = ("door.wrong-preamble", "handshake.", "link.tampered")
            counters = receiver.counters() + sender.counters()
            refused = sum(count for name, count in counters.items() if name.startswith(where))
            assert refused >= len(places) * 3 // 4
            assert {link.role for link in receiver.links()} == {"orchestrator"}

    run(scenario())


# --- datagrams


@contextmanager
def somebody():
    """A UDP socket that is nobody's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(UDP)
        sock.setblocking(False)
        yield sock


def test_datagrams_are_let_in_once_in_any_order_and_with_the_key_alone():
    async def scenario():
        async with lab(udp=UDP) as cluster:
            node = await cluster.node("orchestrator")
            epoch = 1_800_000_000_000
            member = Sealer(CLUSTER_KEY, node_id="ab" * 8, epoch=epoch)
            alive = encode(Packet(0, False, Gossip(), [MemberUpdate(State.ALIVE, "ab" * 8, epoch, 0)]))
            honest = [member.seal(alive) for _ in range(50)]
            wrong_key = Sealer(b"w" * 32, node_id="ab" * 8, epoch=epoch)
            first = honest[0]
            tampered = [first[:at] + bytes([first[at] ^ 1]) + first[at + 1 :] for at in range(len(first))]
            with somebody() as sock:

                async def arrives(datagrams: list[bytes], rises: dict[str, int]) -> None:
                    before = node.counters()
                    for datagram in datagrams:
                        sock.sendto(datagram, ("127.0.0.1", node.udp_port))
                    await until(lambda: {name: node.counters()[name] - before[name] for name in rises} == rises)

                await arrives(tampered, {"datagram.wrong-magic": 4, "datagram.wrong-tag": len(first) - 4})
                await arrives([wrong_key.seal(alive)], {"datagram.wrong-tag": 1})
                await arrives([first[:cut] for cut in range(44)], {"datagram.too-short": 44})
                assert node._membership.state_of("ab" * 8) is None, "nothing of that was believed"
                reordered = random.Random(1).sample(honest, len(honest))
                await arrives(reordered, {"datagram.opened": 50})  # the control
                assert node._membership.state_of("ab" * 8) is State.ALIVE
                await arrives(honest, {"datagram.replayed": 50, "datagram.opened": 0})

    run(scenario())


# --- a member that lies


def over_link(packet: Packet, *, epoch: int = 5) -> bytes:
    return encode_frame(FrameType.SWIM, payload=epoch.to_bytes(8, "big") + encode(packet))


def test_a_member_that_lies_in_gossip_is_not_believed_and_its_truths_are():
    async def scenario():
        async with lab(udp=UDP) as cluster:
            node, victim, _ = await cluster.trio()
            liar = AUTHORITY.mint("stage-2-of-3")
            peer = await within(RawPeer.linked(node, liar, CLUSTER_KEY))
            never = (1 << 64) - 1
            node_epoch, victim_epoch = node._epoch, victim._epoch
            lies = [
                MemberUpdate(State.DEAD, victim.node_id, never, 0, liar.node_id),
                MemberUpdate(State.LEFT, node.node_id, never, 0),
                MemberUpdate(State.DEAD, victim.node_id, victim_epoch, 0, liar.node_id),  # that one it refutes itself
                NameEntry("pp-entry", victim.node_id, never, 7, 9, b"trap"),
            ]
            peer.write(over_link(Packet(0, False, Gossip(), lies)))
            await until(lambda: node.counters()["gossip.implausible-epoch"] >= 3)
            # A name of its own that only stage 0 may own; and one that is its own.
            victim.register("pp-entry", "stage")
            claims = [NameEntry(name, liar.node_id, 5, 1, 0, b"box") for name in ("pp-entry", "pp-stage-2")]
            myself = MemberUpdate(State.ALIVE, liar.node_id, 5, 1)
            peer.write(over_link(Packet(1, False, Gossip(), [myself, *claims])))
            assert await within(node.resolve("pp-stage-2")) == Address(liar.node_id, "box")
            assert await within(node.resolve("pp-entry")) == Address(victim.node_id, "stage")
            assert node.counters()["link.false-name"] <= 1
            await until(lambda: node._membership.state_of(victim.node_id) is State.ALIVE)
            assert node._membership.epoch == node_epoch and {link.role for link in node.links()} >= {victim.role}
            peer.write(over_link(Packet(1, False, Gossip()))[:-6] + b"\x63\0\0\0\0\0")  # a packet of an unknown kind
            await until(lambda: node.counters()["gossip.unknown-kind"] == 1)
            await peer.close()

    run(scenario())


def test_junk_for_mailboxes_that_nobody_asked_for_is_dropped_beyond_a_bound(monkeypatch):
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            for number in range(1000):
                peer.write(message_frames(f"junk-{number}", b"x", first=number + 1))
            dropped = 1000 - MAX_UNASKED_OF_ONE
            await until(lambda: node.counters()["link.junk-mailbox"] == dropped)
            asked = node.mailbox("answers")  # the control: one that is asked for gets its messages, from the same peer
            peer.write(message_frames("answers", b"here", first=1001))
            assert (await within(asked.receive())).payload == b"here"
            peer.write(message_frames("junk-0", b"again", first=1002))
            kept = node.mailbox("junk-0")
            assert [(await within(kept.receive())).payload for _ in range(2)] == [b"x", b"again"]
            peer.write(message_frames("late", b"has room now", first=1003))
            assert (await within(node.mailbox("late").receive())).payload == b"has room now"
            await peer.close()

    run(scenario())


def test_a_peer_that_sends_on_without_acknowledgement_loses_its_link_at_the_windows_end(monkeypatch):
    monkeypatch.setattr(session_module, "MAX_UNACKED_BYTES", 3 << 20)

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            events = node.subscribe()
            chunk = bytes(60_000)
            sent = 0
            while node.links() and sent < 200:  # nobody reads: beyond UNASKED_BYTES nothing is acknowledged any more
                sent += 1
                peer.write(message_frames("box", chunk, first=sent))
                await within(peer.drained())
            down = await next_event(events, LinkDown)
            assert "more than fits into its window" in down.reason
            assert node.counters()["link.over-window"] == 1
            kept = len(node._mailboxes._boxes["box"])
            assert UNASKED_BYTES < kept * len(chunk) < UNASKED_BYTES + (3 << 20)
            await peer.close()
            # The control: an honest node waits at the end of its window, and all of it arrives when it is read.
            stage = await cluster.node("stage-1-of-2", window_bytes=1 << 20)
            await within(stage.dial(endpoint_of(node)))
            sending = asyncio.ensure_future(within(send_many(stage, node.address("honest"), chunk, 100)))
            await until(lambda: "honest" in node._mailboxes._boxes and node._mailboxes._boxes["honest"].full)
            assert await receive_all(node, "honest", 100) == [chunk] * 100
            await sending
            assert node.counters()["link.over-window"] == 1

    run(scenario())


async def send_many(node: Node, to: Address, payload: bytes, count: int) -> None:
    for _ in range(count):
        await node.send(to, payload)


def test_what_a_new_link_says_acknowledges_nothing_while_a_mailbox_is_full(monkeypatch):
    monkeypatch.setattr(mailbox_module, "MAILBOX_BYTES", 200_000)
    monkeypatch.setattr(session_module, "MAX_UNACKED_BYTES", 400_000)

    async def scenario():
        async with lab(timing=PATIENT, window_bytes=100_000) as cluster:
            one, other = await cluster.node("orchestrator"), await cluster.node("stage-0-of-2")
            await within(one.dial(endpoint_of(other)))
            box = other.mailbox("box")
            messages = [b"%3d" % number + bytes(10_000) for number in range(100)]

            async def send_all() -> None:
                for message in messages:
                    await one.send(other.address("box"), message)

            sending = asyncio.ensure_future(within(send_all()))
            await until(lambda: box.full)
            for _ in range(5):  # each new link's HELLO says what has come; that must not open the window
                await until(lambda: one.links() and other.links())
                one._roster.peers[other.node_id].link.abort()
                await until(lambda: not one.links() or not other.links())
            assert await receive_all(other, "box", 100) == messages
            await sending
            assert other.counters()["link.over-window"] == 0

    run(scenario())


@pytest.mark.parametrize("asking", [pytest.param("pings", marks=pytest.mark.slow), "signals"])
def test_a_peer_that_asks_and_does_not_read_the_answers_loses_its_link(asking, monkeypatch):
    if asking == "signals":
        monkeypatch.setattr(link_module, "MAX_UNREAD_BYTES", 160 << 10)  # the same, sooner

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            if asking == "pings":
                ask, answer = encode_frame(FrameType.PING, sequence=9), FrameType.PONG
            else:
                ask = encode_frame(FrameType.SIGNAL, payload=encode_signal(Connect("ab" * 8)))
                answer = FrameType.SIGNAL
            peer.write(ask)
            await within(peer.expect(answer))  # the control: one is answered
            peer.stop_reading()
            while node.links():
                peer.write(ask * 5_000)
                await asyncio.wait({asyncio.ensure_future(peer.drained())}, timeout=0.05)
            assert node.counters()["link.unread"] == 1
            await peer.close()
            await still_welcomes(cluster, node)

    run(scenario())


def test_a_relay_that_hands_out_tokens_without_end_is_not_followed():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = AUTHORITY.mint("stage-0-of-2")
            peer = await within(RawPeer.linked(node, identity, CLUSTER_KEY))
            for number in range(500):
                token = Token(number.to_bytes(16, "big"), f"{number:016x}", you_dial=False, you_start=True)
                peer.write(encode_frame(FrameType.SIGNAL, payload=encode_signal(token)))
            await until(lambda: node.counters()["link.too-many-tokens"] == 500 - 64)
            assert len(node._roster.peers) == 1
            await peer.close()
            await still_welcomes(cluster, node)

    run(scenario())


def test_a_message_that_claims_more_than_any_may_have_is_refused_by_its_first_chunk():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            peer = await within(RawPeer.linked(node, AUTHORITY.mint("stage-0-of-2"), CLUSTER_KEY))
            events = node.subscribe()
            peer.write(message_frames("box", b"control"))
            assert await receive_all(node, "box", 1) == [b"control"]
            peer.write(message_frames("box", bytes(MAX_PAYLOAD_BYTES - 8), first=2, total=MAX_MESSAGE_BYTES + 1))
            assert "claims 67,108,865 bytes" in (await next_event(events, LinkDown)).reason
            assert node.counters()["link.bad-data"] == 1
            await peer.close()

    run(scenario())
