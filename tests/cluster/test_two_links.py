"""Two links to one peer: which of them is kept, when what the two ends say about it crosses on the way."""

from __future__ import annotations

from ppsmoke.cluster.addresses import Address
from ppsmoke.cluster.events import LinkDown, LinkUp
from ppsmoke.cluster.frames import FrameType, encode_frame
from ppsmoke.cluster.handshake import Bye, ByeReason
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.node import Node
from ppsmoke.keys import derive
from tests.lab.cluster import RUN_KEY, Lab, lab, next_event, run, until, within
from tests.lab.raw_peer import RawPeer

CLUSTER_KEY = derive(RUN_KEY, "cluster")
NO_LONGER_NEEDED = encode_frame(FrameType.BYE, payload=Bye(ByeReason.DUPLICATE, "another link is kept").encode())


def lower_than(cluster: Lab, node: Node) -> Identity:
    """A stage whose id is the lower one: it serves, so it decides which link is kept."""
    for generation in range(100):
        identity = cluster.authority.mint("stage-0-of-2", generation)
        if identity.node_id < node.node_id:
            return identity
    raise AssertionError("unreachable")


async def ready_for_ready(node: Node, identity: Identity) -> RawPeer:
    """A link that the serving side has only to take."""
    peer = await within(RawPeer.dial(node, identity, CLUSTER_KEY))
    peer.say_hello(identity.node_id)
    await within(peer.expect(FrameType.READY))
    return peer


def test_a_ready_that_was_overtaken_by_a_later_one_does_not_win():
    """The first link was taken over a slow relay, the second directly a moment later: the second READY arrives first.
    If the first one's replaced the link again, its end, which is due now, would leave a linked node without a link."""

    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = lower_than(cluster, node)
            events = node.subscribe()
            relayed, direct = [await ready_for_ready(node, identity) for _ in range(2)]
            direct.write(encode_frame(FrameType.READY, sequence=2))
            await next_event(events, LinkUp)
            relayed.write(encode_frame(FrameType.READY, sequence=1) + NO_LONGER_NEEDED)
            await until(lambda: len(node._maker.links) == 1, doing="the end of the link that was replaced")
            told = [events.get_nowait() for _ in range(events.qsize())]
            assert not [event for event in told if isinstance(event, (LinkUp, LinkDown))]
            await within(node.send(Address(identity.node_id, "box"), b"over the kept one"))
            assert (await within(direct.expect(FrameType.DATA))).payload.endswith(b"over the kept one")
            await relayed.close()
            await direct.close()
            await next_event(events, LinkDown)

    run(scenario())


def test_readies_in_the_order_of_their_decisions_replace_one_another():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            identity = lower_than(cluster, node)
            events = node.subscribe()
            relayed, direct = [await ready_for_ready(node, identity) for _ in range(2)]
            relayed.write(encode_frame(FrameType.READY, sequence=1))
            await next_event(events, LinkUp)
            direct.write(encode_frame(FrameType.READY, sequence=2))
            await next_event(events, LinkUp)
            await within(node.send(Address(identity.node_id, "box"), b"over the later one"))
            assert (await within(direct.expect(FrameType.DATA))).payload.endswith(b"over the later one")
            await relayed.close()
            await direct.close()

    run(scenario())
