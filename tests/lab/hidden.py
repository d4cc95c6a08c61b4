"""Nodes that cannot be dialled, on one machine: they listen, but nobody is told where."""

from __future__ import annotations

from collections.abc import Sequence

from ppsmoke.cluster.addresses import Candidate, Endpoint
from ppsmoke.cluster.advertising import meta_of
from ppsmoke.cluster.events import LinkInfo
from ppsmoke.cluster.node import Node
from tests.lab.cluster import Lab, endpoint_of, until, within


def advertise(node: Node, candidates: Sequence[Candidate] = ()) -> None:
    """From now on the node says that it can be dialled there, and nowhere else. Links that stand have heard more."""
    node._roster.candidates = tuple(candidates)
    node._membership.set_meta(meta_of(candidates))


async def hidden(cluster: Lab, role: str, **options) -> Node:
    node = await cluster.node(role, **options)
    advertise(node)
    return node


def nowhere(node: Node) -> Endpoint:
    """Who it is, and that nobody knows where."""
    return Endpoint(node.role, 0, node.node_id, "", 0, None)


async def hidden_stages(cluster: Lab, **options) -> tuple[Node, Node, Node]:
    """The orchestrator, which can be dialled, and two stages that cannot and have dialled it."""
    orchestrator = await cluster.node("orchestrator", **options)
    stages = [await hidden(cluster, f"stage-{index}-of-2", **options) for index in (0, 1)]
    for stage in stages:
        await within(stage.dial(endpoint_of(orchestrator)), "a stage's dial")
    return orchestrator, stages[0], stages[1]


async def dialled_stages(cluster: Lab, **options) -> tuple[Node, Node, Node]:
    """An orchestrator that nobody can dial, and has dialled two stages that cannot dial each other."""
    orchestrator = await cluster.node("orchestrator", **options)
    stages = [await hidden(cluster, f"stage-{index}-of-2", **options) for index in (0, 1)]
    advertise(orchestrator)
    for stage in stages:
        await within(orchestrator.dial(endpoint_of(stage)), "the orchestrator's dial")
    return orchestrator, stages[0], stages[1]


def info(one: Node, other: Node) -> LinkInfo | None:
    """The link from one to the other, as the first sees it."""
    return next((link for link in one.links() if link.peer == other.node_id), None)


async def until_path(one: Node, other: Node, path: str) -> None:
    """Both ends are on a link of that path."""

    def agreed() -> bool:
        return all(link is not None and link.path == path for link in (info(one, other), info(other, one)))

    await until(agreed, doing=f"a {path} link between {one.role} and {other.role}")
