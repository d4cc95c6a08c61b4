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
    """A link that is up. path: direct, punched or relayed. rtt_ms: None until measured."""

    peer: str
    role: str
    path: str
    rtt_ms: float | None
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class Member:
    """role: "" until it has shown a certificate. linked: there is a link to it now."""

    node_id: str
    role: str
    state: str
    linked: bool
