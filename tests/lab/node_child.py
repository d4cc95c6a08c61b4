"""A node in a process of its own, which can be killed or frozen: echoes what comes to its mailbox "echo".

python -m tests.lab.node_child ROLE GRACE_S: prints its TCP port, ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ppsmoke.cluster.addresses import Address, Endpoint
from ppsmoke.cluster.identity import RunAuthority
from tests.lab.cluster import IMPATIENT, RUN_KEY, lab


@contextmanager
def node_child(role: str) -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """The child and where it listens; killed at the end."""
    command = [sys.executable, "-m", "tests.lab.node_child", role]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        port = int(child.stdout.readline())
        node_id = RunAuthority(RUN_KEY).mint(role).node_id
        yield child, Endpoint(role, 0, node_id, "127.0.0.1", port, None)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


async def main(role: str) -> None:
    async with lab(timing=IMPATIENT) as cluster:
        node = await cluster.node(role)
        print(node.tcp_port, flush=True)
        mailbox = node.mailbox("echo")
        while True:
            delivery = await mailbox.receive()
            await node.send(Address(delivery.sender, "echoed"), delivery.payload)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
