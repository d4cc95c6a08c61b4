"""What the story asks of whatever gives it machines: local processes (loopback.py) or rented ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.identity import Identity


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage to start: who it will be, and the environment that makes it so (design, "Environment of a stage")."""

    stage: int
    identity: Identity
    environment: Mapping[str, str]


class Fleet(Protocol):
    """Machines for the stages of one run."""

    async def rent(self, specs: list[StageSpec]) -> None:
        """Bring up a machine for each spec. Returns once all are on their way; raises RentError or EnvironmentLacks."""

    def endpoints(self) -> AsyncIterator[Endpoint]:
        """Where to dial each stage, as soon as it is known; a newer generation of a stage supersedes the older."""

    async def watch(self) -> NoReturn:
        """Raises StageError, naming the stage, as soon as one of the machines is known to be lost."""

    async def logs(self, stage: int | None) -> str:
        """The end of what the stage (None: each) has printed. Bounded, never raises."""

    async def destroy_all(self) -> None:
        """End every machine and see that it has ended. Raises DestroyFailed naming what is left."""
