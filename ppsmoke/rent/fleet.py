"""What the story asks of whatever gives it machines: local processes (loopback.py) or rented ones (vast_fleet.py)."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.identity import Identity
from ppsmoke.errors import SmokeError
from ppsmoke.waiting import Deadline


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage to start: who it will be, the environment that makes it so (design, "Environment of a stage"), and
    what its boot and we prove to each other where the code is pushed."""

    stage: int
    generation: int
    identity: Identity
    environment: Mapping[str, str] = field(repr=False)
    boot_secret: bytes = field(repr=False)

    def certificates_json(self) -> str:
        """What a node reads from PPSMOKE_NODE_CERTS; nothing in it is secret."""
        certificates = {"ca": self.identity.ca_der, "leaf": self.identity.leaf_der}
        return json.dumps({name: base64.b64encode(der).decode() for name, der in certificates.items()})


SpecOf = Callable[[int, int], StageSpec]  # (stage, generation): each generation has an identity and secrets of its own


class Fleet(Protocol):
    """Machines for the stages of one run. listen_host: where the orchestrator listens, so that its datagrams get to
    the stages; it is never dialled by a stage that it cannot dial itself. destroy_budget_s: the most that destroy_all
    may take. reach_within_s: how long after its endpoint became known a stage may be out of reach."""

    listen_host: str
    destroy_budget_s: float
    reach_within_s: float

    async def rent(self, num_stages: int, spec_of: SpecOf, deadline: Deadline) -> None:
        """Bring up a machine for each stage. Returns once each one's node is being started; raises RentError,
        StageError or EnvironmentLacks. What listens is told through endpoints() meanwhile."""

    def endpoints(self) -> AsyncIterator[Endpoint]:
        """Where to dial each stage, as soon as it is known; a newer generation of a stage supersedes the older. Every
        caller is told of all of them."""

    async def watch(self) -> NoReturn:
        """Raises StageError, naming the stage, as soon as one of the machines is known to be lost."""

    def link_changed(self, node_id: str, *, up: bool) -> None:
        """The link to this node has gone down, or has come up: a hint for `watch` to look."""

    def failing(self, error: SmokeError) -> None:
        """The run has failed like this, and destroying comes next: say so now where that may take a while."""

    async def logs(self, stage: int | None) -> str:
        """The end of what the stage (None: each) has printed. Bounded, never raises."""

    async def destroy_all(self) -> None:
        """End every machine and see that it has ended. Raises DestroyFailed naming what is left."""


class Endpoints:
    """What is known of where stages listen: kept, so that whoever asks late is told of all."""

    def __init__(self) -> None:
        self._known: list[Endpoint] = []
        self._more = Signal()

    def put(self, endpoint: Endpoint) -> None:
        self._known.append(endpoint)
        self._more.notify()

    async def each(self) -> AsyncIterator[Endpoint]:
        """All of them from the first on, for ever."""
        seen = 0
        while True:
            while seen < len(self._known):
                seen += 1
                yield self._known[seen - 1]
            await self._more.wait()
