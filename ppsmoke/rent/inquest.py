"""How a node has ended that there is no link to: the boot beside it, which has the port again then, is asked.

A link that goes down is no proof, as networks flap: while the node lives, its own port answers as a node's does, and
nothing is concluded. A node that was killed is known within a second or two instead of LinkLost's fifteen.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.changes import Signal
from ppsmoke.errors import StageError, last_words_hint
from ppsmoke.rent.fleet import StageSpec
from ppsmoke.rent.push import NO_OUTPUT, BootFailed, BootStatus, ask_boot
from ppsmoke.waiting import Deadline, cancel_and_reap

FIRST_LINK_S = 5.0  # a node that has only just started may take so long to be linked before anybody asks
ASK_S = 10.0  # for one question
STILL_S = 20.0  # that there is no link yet is said so often
AGAIN_S, MOST_AGAIN_S = 0.3, 3.0  # between two questions: the boot needs half a second to take its port back
ENDED = "ended"


@dataclass
class _Started:
    """A node that was started somewhere."""

    stage: int
    host: str
    port: int
    secret: bytes = field(repr=False)
    asking: asyncio.Task[BootStatus] | None = None  # while there is no link to it
    was_linked: bool = False


class Inquest:
    """Of one run. It is told of nodes that start and of links that come and go; `watch` raises for one that ended.
    say(text, stage=...) gets a line for what a person waits for."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._nodes: dict[str, _Started] = {}  # by node id
        self._changed = Signal()
        self._over = False

    def started(self, endpoint: Endpoint, spec: StageSpec) -> None:
        """This node is being started, and is soon to be linked."""
        node = _Started(spec.stage, endpoint.host, endpoint.tcp_port, spec.boot_secret)
        self._nodes[endpoint.node_id] = node
        self._ask(node, after_s=FIRST_LINK_S)

    def link_changed(self, node_id: str, *, up: bool) -> None:
        """The link to this node went down, or is up again."""
        node = self._nodes.get(node_id)
        if node is None or self._over:
            return
        if node.asking is not None:
            node.asking.cancel()
            node.asking = None
        if not up:
            self._say("the link to its node is down; asking the boot beside it", stage=node.stage)
            self._ask(node)
        elif node.was_linked:
            self._say("its node is linked again", stage=node.stage)
        node.was_linked = node.was_linked or up

    async def watch(self) -> NoReturn:
        """Raises StageError, with its last output, for a node whose boot says that it has ended."""
        try:
            while True:
                for node in self._nodes.values():
                    if node.asking is not None and node.asking.done() and not node.asking.cancelled():
                        raise _error(node.stage, node.asking.result())
                await self._changed.wait()
        finally:
            self._over = True
            await cancel_and_reap(*(node.asking for node in self._nodes.values() if node.asking is not None))

    def _ask(self, node: _Started, *, after_s: float = 0.0) -> None:
        node.asking = asyncio.ensure_future(self._until_ended(node, after_s))
        node.asking.add_done_callback(lambda _: self._changed.notify())

    async def _until_ended(self, node: _Started, after_s: float) -> BootStatus:
        """Ask until a boot answers and says that its node has ended; for ever while the node lives."""
        began = said_at = time.monotonic()
        await asyncio.sleep(after_s)
        pause_s = AGAIN_S
        while True:
            try:
                status = await ask_boot(node.host, node.port, node.secret, deadline=Deadline.after(ASK_S))
                seen = f"its boot says: {status.state}"
                if status.state == ENDED:
                    return status
            except BootFailed as error:  # refused: nobody has the port just now; silent: a node, which lets us begin
                seen = error.cause
            if time.monotonic() - said_at >= STILL_S:
                said_at = time.monotonic()
                self._say(f"no link to its node for {said_at - began:.0f} s ({seen})", stage=node.stage)
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_AGAIN_S, pause_s * 1.5)


def _error(stage: int, status: BootStatus) -> StageError:
    hint = last_words_hint(status.tail)
    how = "could not be run" if status.exit is None else f"ended with status {status.exit}"
    if status.exit is not None and status.exit < 0:
        how = f"was killed by {_signal_name(-status.exit)}"
        if -status.exit == signal.SIGKILL:
            hint = "mostly its machine ran out of memory: try a smaller --max-context, or another --gpu"
    words = f": {status.last_line}" if status.last_line != NO_OUTPUT else ""
    return StageError(f"its node {how}{words}", stage=stage, hint=hint, detail=status.tail)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
