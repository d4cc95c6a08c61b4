"""Where things are in a cluster: mailboxes, nodes, and the sockets a node may be reached at. Values alone."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

CandidateKind = Literal["host", "mapped", "observed"]
_NODE_ID = re.compile(r"[0-9a-f]{16}\Z")
_NAME_LABELS = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,32}\Z")  # of a link-local address
MAX_MAILBOX_NAME_BYTES = 64
MAX_HOST_CHARS = 253


def is_node_id(text: str) -> bool:
    return _NODE_ID.match(text) is not None


def is_ip(text: str) -> bool:
    """An address as it is, that no resolver need be asked about."""
    address, percent, zone = text.partition("%")
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return False
    return not percent or (version == 6 and _ZONE.match(zone) is not None)


def is_host(text: str) -> bool:
    """An address or a name that a resolver takes. Anything else makes Python's raise UnicodeError or ValueError."""
    return len(text) <= MAX_HOST_CHARS and (_NAME_LABELS.match(text) is not None or is_ip(text))


@dataclass(frozen=True)
class Address:
    """A mailbox on a node; as text "<node id>/<mailbox>"."""

    node_id: str
    mailbox: str

    def __str__(self) -> str:
        return f"{self.node_id}/{self.mailbox}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for anything that is no address."""
        node_id, _, mailbox = text.partition("/")
        if not is_node_id(node_id) or not 0 < len(mailbox.encode()) <= MAX_MAILBOX_NAME_BYTES:
            raise ValueError(f"no mailbox address: {text[:100]!r}")
        return cls(node_id, mailbox)


@dataclass(frozen=True)
class Delivery:
    """A message as it lies in a mailbox. sender_role is the one in the sender's certificate."""

    sender: str
    sender_role: str
    payload: bytes


@dataclass(frozen=True)
class Candidate:
    """A socket a node may be reached at: its own (host), one mapped to it (mapped), or as another saw it (observed)."""

    kind: CandidateKind
    host: str
    tcp_port: int
    udp_port: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """A node somebody told us to dial: who it must prove to be, and where ("": it cannot be dialled, and has to come
    by itself or over a relay). A higher generation supersedes."""

    role: str
    generation: int
    node_id: str
    host: str
    tcp_port: int
    udp_port: int | None

    @property
    def candidate(self) -> Candidate:
        return Candidate("mapped", self.host, self.tcp_port, self.udp_port)
