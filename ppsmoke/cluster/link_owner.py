"""What a link (link.py) asks of whoever keeps it, and tells it. The roster is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ppsmoke.cluster.frames import Frame
from ppsmoke.cluster.handshake import Bye, Hello
from ppsmoke.errors import LinkError

if TYPE_CHECKING:
    from ppsmoke.cluster.link import Link


class LinkOwner(Protocol):
    def hello_for(self, peer_id: str) -> Hello: ...

    def admit(self, link: Link) -> Bye | None:
        """Asked on the serving side alone, which decides for both: None to take the link (its admission is a number
        above those of all it took before), a reason to refuse it."""

    def link_up(self, link: Link) -> None: ...

    def link_frame(self, link: Link, frame: Frame) -> None:
        """A DATA, ACK, SWIM, SIGNAL, CARRY or PING frame. May raise FrameError, which ends the link."""

    def link_heard(self, link: Link) -> None: ...

    def link_silent(self, link: Link) -> None:
        """It has become silent: a ping is without an answer. It may speak again, and then says nothing of that."""

    def link_writable(self, link: Link) -> None: ...

    def link_refused(self, link: Link, error: LinkError) -> None:
        """The two HELLOs do not fit together."""

    def link_broken(self, link: Link, reason: str) -> None:
        """A link that is up ends without the peer's BYE: the peer has broken it, or somebody on the way. reason: a
        word for the counters."""

    def link_down(self, link: Link, cause: str, bye: Bye | None) -> None:
        """Told once, if the link was up; bye if the peer said one."""
