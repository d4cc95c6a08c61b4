"""What a node tells those who watch it: events as they happen, and tables for a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkUp:
    peer: str
    role: str
    restarted: bool  # the peer is in a new life: what the old one knew is gone


@dataclass(frozen=True)
class LinkDown:
    peer: str
    role: str
    reason: str


@dataclass(frozen=True)
class MemberChanged:
    """state: alive, suspect, dead or left."""

    peer: str
    role: str
    state: str


Event = LinkUp | LinkDown | MemberChanged


@dataclass(frozen=True)
class LinkInfo:
    """A link that is up. path: direct, punched or relayed, via: the relay's role. rtt_ms: None until measured.
    reason: how the path came to be this one, and why it is no better."""

    peer: str
    role: str
    path: str
    rtt_ms: float | None
    bytes_in: int
    bytes_out: int
    via: str = ""
    reason: str = ""


@dataclass(frozen=True)
class PortCheck:
    """A mapped port of a node, dialled back by another one. cause: "" if it answered there."""

    role: str
    host: str
    port: int
    by: str
    cause: str

    def __str__(self) -> str:
        verdict = f"does not answer ({self.cause})" if self.cause else "answers"
        return f"{self.role}: mapped port {self.host}:{self.port} {verdict}, dialled by {self.by}"


@dataclass(frozen=True)
class Member:
    """role: "" until it has shown a certificate. linked: there is a link to it now."""

    node_id: str
    role: str
    state: str
    linked: bool
