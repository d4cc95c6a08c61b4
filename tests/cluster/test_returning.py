"""A node that has left and is back in a new life: those whom it left find that out and look for it again."""

from __future__ import annotations

import pytest

from ppsmoke.cluster.events import LinkDown
from ppsmoke.cluster.frames import FrameType, encode_frame
from ppsmoke.cluster.handshake import Bye, ByeReason
from ppsmoke.cluster.node import Node
from ppsmoke.cluster.swim_state import MILLISECOND, Config, MemberChanged, State
from ppsmoke.keys import derive
from tests.lab.cluster import RUN_KEY, endpoint_of, lab, next_event, run, until, within
from tests.lab.raw_peer import RawPeer


def tell(node: Node, peer_id: str, state: State, epoch: int) -> None:
    """As gossip of a third node would."""
    node._on_membership(MemberChanged(peer_id, State.LEFT, state, epoch, 0, "0" * 16))


@pytest.mark.slow
def test_who_left_and_is_alive_again_is_dialled_again():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            async with cluster.listening("stage-0-of-2") as stage:
                await within(node.dial(endpoint_of(stage)))
                port = stage.tcp_port
            await until(lambda: node._roster.peers[stage.node_id].left)
            back = await cluster.node("stage-0-of-2", tcp=("127.0.0.1", port))
            tell(node, back.node_id, State.LEFT, back._epoch)
            assert node._roster.peers[back.node_id].left
            tell(node, back.node_id, State.ALIVE, back._epoch)
            await until(node.links, doing="a link to the new life")
            await within(node.send(back.address("box"), b"welcome"))
            assert (await within(back.mailbox("box").receive())).payload == b"welcome"

    run(scenario())


def test_a_farewell_that_comes_after_the_news_of_a_return_is_the_former_lifes():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = cluster.authority.mint("stage-0-of-2")
            for alive_epoch, has_left in ((6, False), (0, True)):
                events = node.subscribe()
                by_hand = await within(RawPeer.linked(node, identity, derive(RUN_KEY, "cluster"), epoch=5))
                tell(node, identity.node_id, State.ALIVE if alive_epoch else State.DEAD, alive_epoch)
                by_hand.write(
                    encode_frame(FrameType.BYE, payload=Bye(ByeReason.LEAVING, "its node has ended").encode())
                )
                await next_event(events, LinkDown)
                assert bool(node._roster.peers[identity.node_id].left) is has_left
                await by_hand.close()

    run(scenario())


@pytest.mark.slow
def test_a_returner_that_knows_nobody_is_found_by_datagram_of_those_whom_it_left():
    async def scenario():
        asking = Config(dead_ping_period=50 * MILLISECOND)
        async with lab(udp=("127.0.0.1", 0)) as cluster:
            node = await cluster.node("orchestrator", swim=asking)
            async with cluster.listening("stage-0-of-2") as stage:
                await within(node.dial(endpoint_of(stage)))
                ports = {"tcp": ("127.0.0.1", stage.tcp_port), "udp": ("127.0.0.1", stage.udp_port)}
            await until(lambda: node._roster.peers[stage.node_id].left)
            back = await cluster.node("stage-0-of-2", **ports)
            await until(lambda: node.links() and back.links(), doing="a link to the new life")

    run(scenario())
