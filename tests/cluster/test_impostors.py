"""Who is let in: another run's key, no key, and a node of this run that says it is another."""

from __future__ import annotations

import ssl
from dataclasses import replace

import pytest

from ppsmoke.cluster.frames import FrameType
from ppsmoke.cluster.handshake import Bye, KeyRefused
from ppsmoke.errors import DeadlineExceeded, LinkError
from ppsmoke.waiting import Deadline
from tests.lab.cluster import IMPATIENT, endpoint_of, lab, run, until, within
from tests.lab.honest import AUTHORITY, CLUSTER_KEY, STRANGERS, identity_on_side, still_welcomes
from tests.lab.raw_peer import RawPeer


@pytest.mark.parametrize("side", ["server", "client"])
def test_another_runs_identity_gets_no_link(side):
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            # It trusts our CA, so that it is we who refuse.
            foreign = replace(identity_on_side(side, node.node_id, STRANGERS), ca_der=AUTHORITY.ca_der)
            impostor = await cluster.node("stage-0-of-2", identity=foreign)
            with pytest.raises((LinkError, DeadlineExceeded)):
                await Deadline.after(0.5).wait(impostor.dial(endpoint_of(node)), doing="a dial in vain")
            await until(lambda: node.counters()["handshake.wrong-certificate"] >= 1)
            assert not node.links() and not impostor.links() and node.counters()["door.linked"] == 0
            honest = await cluster.node("stage-0-of-2", identity=identity_on_side(side, node.node_id))
            await within(honest.dial(endpoint_of(node)), "the same with this run's certificate")

    run(scenario())


def test_a_client_whose_certificate_is_refused_hears_that_the_peer_refused_its_key():
    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            node = await cluster.node("orchestrator")
            # It trusts our CA, so to it we are genuine; under TLS 1.3 it believes at first that it is connected.
            rogue = replace(identity_on_side("client", node.node_id, STRANGERS), ca_der=AUTHORITY.ca_der)
            impostor = await cluster.node("stage-0-of-2", identity=rogue)
            with pytest.raises(KeyRefused, match="orchestrator refused our key"):
                await within(impostor.dial(endpoint_of(node)))
            assert node.counts["linked"] == 0

    run(scenario())


@pytest.mark.parametrize("posing_as", ["orchestrator", "stage-1-of-2"])
@pytest.mark.parametrize("side", ["server", "client"])
def test_a_stage_cannot_pose_as_another_node(posing_as, side):
    """It has a valid certificate, its own, and claims another's id in its preamble and HELLO."""

    async def scenario():
        async with lab(timing=IMPATIENT) as cluster:
            victim_role = "stage-1-of-2" if posing_as == "orchestrator" else "orchestrator"
            claimed = AUTHORITY.mint(posing_as)
            for generation in range(100):  # a victim that makes the claimed id the wanted side
                victim_identity = AUTHORITY.mint(victim_role, generation)
                if (claimed.node_id < victim_identity.node_id) == (side == "server"):
                    break
            victim = await cluster.node(victim_role, identity=victim_identity)
            lie = replace(AUTHORITY.mint("stage-0-of-2"), node_id=claimed.node_id)
            impostor = await cluster.node(posing_as, identity=lie)
            with pytest.raises((LinkError, DeadlineExceeded)):
                await Deadline.after(0.5).wait(impostor.dial(endpoint_of(victim)), doing="a dial in vain")
            await until(lambda: victim.counters()["handshake.wrong-node"] >= 1)
            assert "stage-0-of-2" in victim.last_refusal and claimed.node_id in victim.last_refusal
            assert not victim.links()
            honest = await cluster.node(posing_as)
            await within(honest.dial(endpoint_of(victim)), "the one that it posed as")
            assert [link.role for link in victim.links()] == [posing_as]

    run(scenario())


def test_whoever_shows_no_certificate_gets_no_link():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
            identity = identity_on_side("client", node.node_id)
            peer = await within(RawPeer.dial(node, identity, CLUSTER_KEY, context=bare))
            peer.say_hello(identity.node_id)
            assert await within(peer.frame()) is None
            await until(lambda: node.counters()["handshake.no-certificate"] == 1)
            assert "CERTIFICATE" in node.last_refusal
            await peer.close()
            await still_welcomes(cluster, node)

    run(scenario())


def test_a_hello_with_another_id_than_the_certificates_is_refused():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            peer = await within(RawPeer.dial(node, AUTHORITY.mint("stage-0-of-2"), CLUSTER_KEY))
            peer.say_hello("00" * 8)
            bye = Bye.decode((await within(peer.expect(FrameType.BYE))).payload)
            assert "HELLO of 0000000000000000 under the certificate" in bye.text
            await peer.close()
            await until(lambda: node.counters()["handshake.wrong-node"] == 1)
            await still_welcomes(cluster, node)

    run(scenario())
