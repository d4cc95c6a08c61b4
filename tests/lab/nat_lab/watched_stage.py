"""A real stage node (`python -m ppsmoke node`, with all of its environment) that also says what it sees of its peers.

python -m tests.lab.nat_lab.watched_stage FILE NODE_ID...: it greets each of these, and FILE always holds what its watch
has seen, as JSON, whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ppsmoke import stage_node
from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.node import Node
from ppsmoke.waiting import running
from tests.lab.nat_lab.watch import LOOK_EVERY_S, Watch


class WatchedNode(Node):
    file = Path()
    greets: tuple[str, ...] = ()

    @classmethod
    @asynccontextmanager
    async def listening(cls, identity: Identity, **more: Any) -> AsyncIterator[Node]:
        async with AsyncExitStack() as stack:
            node = await stack.enter_async_context(super().listening(identity, **more))
            watch = await stack.enter_async_context(Watch.over(node))
            _tell(watch, cls.file)
            await stack.enter_async_context(running(_keep_telling(watch, cls.file), name="tell what is seen"))
            for peer in cls.greets:
                await stack.enter_async_context(running(watch.greet(peer), name=f"greet {peer}"))
            yield node


def _tell(watch: Watch, file: Path) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(watch.seen()))
    os.replace(fresh, file)


async def _keep_telling(watch: Watch, file: Path) -> None:
    told = ""
    while True:
        if (seen := json.dumps(watch.seen())) != told:
            _tell(watch, file)
            told = seen
        await asyncio.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    WatchedNode.file, WatchedNode.greets = Path(sys.argv[1]), tuple(sys.argv[2:])
    stage_node.Node = WatchedNode
    sys.exit(stage_node.main())
