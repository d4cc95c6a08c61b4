"""Links over a relay: real nodes and sockets on loopback, two of which nobody is told how to dial."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from contextlib import suppress

import pytest

from ppsmoke.cluster import relay as relay_module
from ppsmoke.cluster.addresses import Address, Candidate
from ppsmoke.cluster.frames import FrameType
from ppsmoke.cluster.handshake import Bye, ByeReason, LinkKind, Preamble, preamble_key
from ppsmoke.cluster.node import Node
from ppsmoke.cluster.raw_sockets import RawSocket
from ppsmoke.cluster.relay import GO, Splice
from ppsmoke.cluster.signals import Token, decode_signal
from ppsmoke.errors import LinkError
from ppsmoke.keys import derive
from ppsmoke.waiting import Deadline, cancel_and_reap
from tests.lab.cluster import RUN_KEY, endpoint_of, lab, run, until, within
from tests.lab.hidden import dialled_stages, hidden, hidden_stages, info, nowhere
from tests.lab.raw_peer import RawPeer

CLUSTER_KEY = derive(RUN_KEY, "cluster")


async def exchange(one: Node, other: Node, count: int = 3) -> None:
    """Messages both ways, each once and in order."""
    for number in range(count):
        await within(one.send(other.address("box"), b"there %d" % number))
        await within(other.send(one.address("box"), b"back %d" % number))
    for node, text in ((one, b"back"), (other, b"there")):
        received = [(await within(node.mailbox("box").receive())).payload for _ in range(count)]
        assert received == [b"%s %d" % (text, number) for number in range(count)]


def test_two_nodes_that_nobody_can_dial_meet_over_the_one_that_both_dialled():
    async def scenario():
        async with lab() as cluster:
            orchestrator, stage_0, stage_1 = await hidden_stages(cluster)
            stage_1.register("pp-stage-1", "box")
            assert await within(stage_0.resolve("pp-stage-1")) == Address(stage_1.node_id, "box")
            await exchange(stage_0, stage_1)
            link = info(stage_0, stage_1)
            assert (link.path, link.via, link.role) == ("relayed", "orchestrator", "stage-1-of-2")
            assert link.reason.startswith("the first that worked")
            (pair,) = orchestrator.relayed()
            assert {pair.one, pair.other} == {"stage-0-of-2", "stage-1-of-2"}
            assert pair.bytes_from_one > 1000 and pair.bytes_from_other > 1000

    run(scenario())


def test_a_relay_that_dialled_both_ends_dials_their_legs_too():
    async def scenario():
        async with lab() as cluster:
            _, *stages = await dialled_stages(cluster)
            await exchange(*stages)
            assert info(*stages).path == "relayed" and info(*stages).via == "orchestrator"

    run(scenario())


def test_a_home_that_cannot_be_dialled_gathers_a_stage_through_the_other_one():
    async def scenario():
        async with lab() as cluster:
            home = await hidden(cluster, "orchestrator")
            mapped = await cluster.node("stage-0-of-2")
            unmapped = await hidden(cluster, "stage-1-of-2")

            async def known():
                yield endpoint_of(mapped)
                yield nowhere(unmapped)

            gathering = asyncio.ensure_future(home.gather(known(), size=3, deadline=Deadline.after(20)))
            await until(lambda: info(home, mapped))
            await within(unmapped.dial(endpoint_of(mapped)))
            await within(gathering, "gathering over the relay")
            assert info(home, unmapped).path == "relayed" and info(home, unmapped).via == "stage-0-of-2"
            await exchange(home, unmapped)

    run(scenario())


# --- tokens


class Knock:
    """A connection that opens with a relay leg's preamble, and what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def at(cls, node: Node, *, source: str, token: bytes) -> Knock:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.tcp_port)
        writer.write(Preamble(LinkKind.RELAYED, source, node.node_id, token).seal(preamble_key(CLUSTER_KEY)))
        return cls(reader, writer)

    async def answer(self) -> bytes:
        """b"" if it was dropped."""
        try:
            return await within(self.reader.read(1), "the answer to a leg")
        except ConnectionError:
            return b""
        finally:
            self.writer.close()


async def half_a_pair(cluster):
    """A relay, a hidden node whose leg is there, and a peer by hand that has got its token and not used it yet."""
    orchestrator = await cluster.node("orchestrator")
    stage_0 = await hidden(cluster, "stage-0-of-2")
    await within(stage_0.dial(endpoint_of(orchestrator)))
    identity = cluster.authority.mint("stage-1-of-2")
    by_hand = await within(RawPeer.linked(orchestrator, identity, CLUSTER_KEY))
    sending = asyncio.ensure_future(stage_0.send(Address(identity.node_id, "box"), b"never read"))
    token = None
    while not isinstance(token, Token):
        token = decode_signal((await within(by_hand.expect(FrameType.SIGNAL))).payload)
    await until(lambda: orchestrator._reaching.relay._pairs[token.token].legs[stage_0.node_id].done())
    return orchestrator, stage_0, by_hand, identity, token, sending


def test_a_token_is_good_once_for_its_pair_alone():
    async def scenario():
        async with lab() as cluster:
            relay, stage_0, by_hand, identity, token, sending = await half_a_pair(cluster)
            assert (token.peer, token.you_dial, token.you_start) == (stage_0.node_id, True, False)
            counts = relay._reaching.relay.counts
            for source in ("ab" * 8, stage_0.node_id):  # a thief of the token, and a second leg of the same side
                knock = await Knock.at(relay, source=source, token=token.token)
                assert await knock.answer() == b""
            assert counts["bad-token"] == relay.counts["strangers"] == relay.counters()["relay.bad-token"] == 2
            mine = await Knock.at(relay, source=identity.node_id, token=token.token)
            assert await mine.answer() == GO  # the rightful one, in spite of them
            again = await Knock.at(relay, source=identity.node_id, token=token.token)
            assert await again.answer() == b""
            await cancel_and_reap(sending)
            await by_hand.close()

    run(scenario())


def test_a_thief_of_a_token_that_lies_about_its_id_as_well_gets_a_leg_and_no_link():
    """Every member can seal a preamble in another's name: it takes that one's place at the relay; TLS unmasks it."""

    async def scenario():
        async with lab() as cluster:
            relay, stage_0, by_hand, identity, token, sending = await half_a_pair(cluster)
            thief = cluster.authority.mint("stage-2-of-3")
            knock = await Knock.at(relay, source=identity.node_id, token=token.token)
            assert await within(knock.reader.readexactly(len(GO))) == GO
            serves = identity.node_id < stage_0.node_id
            context = thief.tls_context(side="server" if serves else "client")
            preamble = Preamble(LinkKind.RELAYED, stage_0.node_id, identity.node_id, token.token)
            with suppress(OSError):  # it may be hung up on before it is done itself
                posing = RawPeer.speak_tls(knock.writer.transport, context, serves=serves, preamble=preamble)
                (await within(posing)).say_hello(identity.node_id)
            await until(lambda: stage_0.counters()["handshake.wrong-node"] == 1)
            assert len(stage_0.links()) == 1
            knock.writer.transport.abort()
            token = None
            while not isinstance(token, Token):  # the control: it is tried again, and the rightful one's leg is let in
                token = decode_signal((await within(by_hand.expect(FrameType.SIGNAL))).payload)
            mine = await Knock.at(relay, source=identity.node_id, token=token.token)
            assert await mine.answer() == GO
            await cancel_and_reap(sending)
            await by_hand.close()

    run(scenario())


def test_a_leg_that_does_not_come_is_named_and_its_token_expires(monkeypatch):
    monkeypatch.setattr(relay_module, "TOKEN_S", 0.2)

    async def scenario():
        async with lab() as cluster:
            relay, stage_0, by_hand, identity, token, sending = await half_a_pair(cluster)
            peer = stage_0._roster.peers[identity.node_id]
            says = "through orchestrator: the leg of stage-1-of-2 did not come within 0.2 s"
            await until(lambda: peer.last_error is not None and peer.last_error.cause == says)
            late = await Knock.at(relay, source="ab" * 8, token=token.token)
            assert await late.answer() == b""
            await cancel_and_reap(sending)
            await by_hand.close()

    run(scenario())


def test_a_relay_without_a_link_to_the_other_says_so():
    async def scenario():
        async with lab() as cluster:
            relay, stage_0, _ = await hidden_stages(cluster)
            stranger = stage_0._roster.peer("ab" * 8)
            with pytest.raises(LinkError, match="through orchestrator: it has no link to it either"):
                await within(stage_0._reaching._legs.connect(stranger, stage_0._roster.peers[relay.node_id]))
            assert relay._reaching.relay.counts["refused"] == 1

    run(scenario())


def test_a_leg_is_dialled_though_the_link_that_brought_its_token_is_gone_by_then():
    async def scenario():
        async with lab() as cluster:
            relay, stage_0, stage_1 = await hidden_stages(cluster)
            peer = stage_0._roster.peers[relay.node_id]
            token = Token(b"t" * 16, stage_1.node_id, you_dial=True, you_start=True)
            stage_0._reaching._legs.on_token(peer, token)
            peer.link.close(Bye(ByeReason.BROKEN))
            assert peer.link is None
            await until(lambda: relay.counters()["relay.bad-token"] == 1)  # the relay never gave it

    run(scenario())


def test_both_asking_at_once_get_one_pair():
    async def scenario():
        async with lab() as cluster:
            relay, stage_0, stage_1 = await hidden_stages(cluster)
            sends = stage_0.send(stage_1.address("box"), b"1"), stage_1.send(stage_0.address("box"), b"2")
            await within(asyncio.gather(*sends))
            await exchange(stage_0, stage_1, count=0)
            assert len(relay.relayed()) == 1

    run(scenario())


# --- splicing


async def connected() -> tuple[socket.socket, RawSocket]:
    """A TCP connection: our end, and the one for the splice; small buffers, so that a stall comes soon."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        ours.connect(server.getsockname())
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    for sock in (ours, theirs):
        sock.setblocking(False)
    return ours, RawSocket(theirs)


@pytest.mark.parametrize("side", [0, 1])
def test_a_splice_whose_reader_stalls_stops_its_sender_and_loses_nothing(side):
    async def scenario():
        loop = asyncio.get_running_loop()
        (one, raw_one), (other, raw_other) = await connected(), await connected()
        splice = Splice(raw_one, raw_other)
        splicing = asyncio.ensure_future(splice.run())
        source, target = (one, other) if side == 0 else (other, one)
        for sock in (one, other):
            assert await within(loop.sock_recv(sock, 1)) == GO
        data = random.Random(side).randbytes(8 << 20)
        sending = asyncio.ensure_future(loop.sock_sendall(source, data))
        stalled_at = -1
        while stalled_at != splice.bytes[side]:
            stalled_at = splice.bytes[side]
            await asyncio.sleep(0.2)
        assert 0 < stalled_at < 1 << 20 and not sending.done()  # kernel buffers and one of ours
        digest, count = hashlib.sha256(), 0
        while count < len(data):
            part = await within(loop.sock_recv(target, 1 << 16))
            digest.update(part)
            count += len(part)
        await within(sending)
        assert digest.digest() == hashlib.sha256(data).digest()
        await within(loop.sock_sendall(source, b"last words"))
        source.close()
        assert await within(loop.sock_recv(target, 100)) == b"last words"
        assert await within(loop.sock_recv(target, 100)) == b""
        target.close()
        assert await within(splicing) == (side, "hung up")
        raw_one.close()
        raw_other.close()

    run(scenario())


def test_what_is_said_after_a_hang_up_still_gets_through():
    async def scenario():
        loop = asyncio.get_running_loop()
        (one, raw_one), (other, raw_other) = await connected(), await connected()
        splicing = asyncio.ensure_future(Splice(raw_one, raw_other).run())
        one.shutdown(socket.SHUT_WR)
        assert await within(loop.sock_recv(other, 100)) == GO
        assert await within(loop.sock_recv(other, 100)) == b""
        await within(loop.sock_sendall(other, b"bye"))
        other.close()
        assert await within(loop.sock_recv(one, 1)) == GO
        assert await within(loop.sock_recv(one, 100)) == b"bye"
        assert await within(splicing) == (0, "hung up")
        for sock in (one, raw_one, raw_other):
            sock.close()

    run(scenario())


# --- dialling back, and nobody to be reached


def test_gathering_shows_which_mapped_ports_answer():
    async def scenario():
        async with lab() as cluster:
            good = await cluster.node("stage-0-of-2")
            good._roster.candidates += (Candidate("mapped", "127.0.0.1", good.tcp_port),)
            with socket.create_server(("127.0.0.1", 0)) as nobody:  # bound, and given up: refused from then on
                closed_port = nobody.getsockname()[1]
            closed = await cluster.node("stage-1-of-2", advertise=[Candidate("mapped", "127.0.0.1", closed_port)])
            home = await cluster.node("orchestrator")
            home._roster.candidates += (Candidate("mapped", "127.0.0.1", good.tcp_port),)  # somebody else's

            async def known():
                for stage in (good, closed):
                    yield endpoint_of(stage)

            await home.gather(known(), size=3, deadline=Deadline.after(20))
            shown = sorted(map(str, home.port_checks))
            assert shown == [
                f"orchestrator: mapped port 127.0.0.1:{good.tcp_port} does not answer (127.0.0.1:{good.tcp_port}: "
                "whoever answered is not this node), dialled by stage-0-of-2",
                f"stage-0-of-2: mapped port 127.0.0.1:{good.tcp_port} answers, dialled by orchestrator",
                f"stage-1-of-2: mapped port 127.0.0.1:{closed_port} does not answer (127.0.0.1:{closed_port}: "
                "Connection refused), dialled by orchestrator",
            ]

    run(scenario())


def test_nobody_dials_back_what_is_not_advertised():
    async def scenario():
        async with lab() as cluster:
            home, stage_0, _ = await cluster.trio()
            checks = home._reaching.port_checks
            helper = home._roster.peers[stage_0.node_id]
            check = await within(checks._check_own("orchestrator", helper, Candidate("mapped", "127.0.0.1", 22)))
            assert check.cause == "it is not advertised, or too many ask"

    run(scenario())


@pytest.mark.parametrize("told", [True, False])
def test_gathering_what_cannot_be_reached_says_which_side_must_change_what(told):
    async def scenario():
        async with lab() as cluster:
            home = await cluster.node("orchestrator")

            async def known():
                if told:
                    yield nowhere(stage)

            stage = await hidden(cluster, "stage-0-of-1")
            gathering = home.gather(known(), size=2, deadline=Deadline.after(20), reach_within_s=0.2)
            with pytest.raises(LinkError) as caught:
                await within(gathering)
            assert "cannot be reached: no port of theirs is known" in caught.value.cause
            assert ("stage-0-of-1" if told else "1 of 2 members") in caught.value.cause
            assert "rent that stage with a direct (mapped) TCP port, or forward a TCP port" in caught.value.hint

    run(scenario())
