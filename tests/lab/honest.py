"""What an attack's test needs besides the attack: keys of this run and of another, and honest peers that get in."""

from __future__ import annotations

from ppsmoke.cluster.identity import Identity, RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.keys import derive
from tests.lab.cluster import RUN_KEY, Lab, endpoint_of, within

CLUSTER_KEY = derive(RUN_KEY, "cluster")
AUTHORITY = RunAuthority(RUN_KEY)
STRANGERS = RunAuthority(b"another run's key, of 32 bytes..")


def identity_on_side(side: str, node_id: str, authority: RunAuthority = AUTHORITY) -> Identity:
    """A stage 0 whose id makes it the TLS server, or the client, towards node_id: generations have different keys."""
    for generation in range(100):
        identity = authority.mint("stage-0-of-2", generation)
        if (identity.node_id < node_id) == (side == "server"):
            return identity
    raise AssertionError("unreachable")


async def still_welcomes(cluster: Lab, node: Node) -> None:
    """Whatever happened before: an honest peer gets a link."""
    honest = await cluster.node("stage-1-of-2")
    await within(honest.dial(endpoint_of(node)), "an honest link")
