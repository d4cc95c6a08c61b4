"""What a short outage costs a room through which UDP never passes, over real TCP: one line per length.

    python -m tests.lab.outage_table [--outages S ...] [--rooms N]

Rooms of three nodes in the NAT lab (needs root): one asks the other two, half of the rooms all the time, the others
never. In each room one stage's cable is cut, at another moment since its last byte, and healed after so many seconds.
"silent" is the longest time without a byte of that stage; it is lost where a run that waits for an answer would have
ended. 1 if one was, or if an answer came twice or never.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any

from ppsmoke.cluster.addresses import Address, Endpoint
from ppsmoke.cluster.node import Node
from ppsmoke.errors import DeadlineExceeded, LinkLost
from ppsmoke.waiting import Deadline, running
from tests.lab.cluster import lab
from tests.lab.nat_lab.lab import PIPE, NatLab, why_not
from tests.lab.nat_lab.spec import TCP_PORT, UDP_PORT, Site

ASKER, STAGES = "orchestrator", ("stage-0-of-2", "stage-1-of-2")
LINKED_S = 30.0  # for all rooms, from their start, on a busy machine
FIRST_S, STEP_S = 6.0, 0.7  # the first room's cut, and from one's to the next one's: no divisor of the pings' pause
AFTER_S = 22.0  # from the end of an outage: whatever it costs is known
EVERY_S = 0.2  # between the questions of a room that talks
LOOK_EVERY_S = 0.05
ANSWERED_S = 5.0  # for the last answers


class Asker:
    """Guards both stages, and asks the first, which is the one that is cut off."""

    def __init__(self, node: Node, stage_ids: list[str]) -> None:
        self._node = node
        self._stage_ids = stage_ids
        self._sent = 0
        self._answers: list[int] = []
        self._silent_s = 0.0
        self._lost = ""

    @property
    def found(self) -> dict[str, Any]:
        return {"sent": self._sent, "answers": self._answers, "silent_s": self._silent_s, "lost": self._lost}

    async def run(self, *, talks: bool) -> None:
        """Until the end of its stdin, and the last answers."""
        jobs = (self._listen(), self._look(), self._guard())
        async with running(jobs[0], name="listen"), running(jobs[1], name="look"), running(jobs[2], name="guard"):
            async with running(self._talk() if talks else asyncio.sleep(0), name="talk"):
                await end_of_stdin()
            with suppress(DeadlineExceeded):
                await Deadline.after(ANSWERED_S).wait(self._all_answered(), doing="the last answers")

    async def _talk(self) -> None:
        while not self._lost:
            with suppress(LinkLost):
                await self._node.send(Address(self._stage_ids[0], "box"), b"%d" % self._sent)
                self._sent += 1
            await asyncio.sleep(EVERY_S)

    async def _listen(self) -> None:
        while True:
            self._answers.append(int((await self._node.mailbox("box").receive()).payload))

    async def _look(self) -> None:
        while True:
            self._silent_s = max(self._silent_s, self._node._roster.peer(self._stage_ids[0]).silent_s)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _guard(self) -> None:
        try:
            await self._node.guard(self._stage_ids)
        except LinkLost as error:
            self._lost = str(error)

    async def _all_answered(self) -> None:
        while len(self._answers) < self._sent:
            await asyncio.sleep(LOOK_EVERY_S)


async def end_of_stdin() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def child(role: str, host: str, others: list[str], *, talks: bool) -> None:
    """A node that dials the stages at these hosts; an asker prints what it found at the end of its stdin."""
    async with lab() as cluster:
        node = await cluster.node(role, tcp=(host, TCP_PORT), udp=(host, UDP_PORT))
        ids = [cluster.authority.mint(stage).node_id for stage in STAGES]
        for stage, node_id, where in zip(STAGES, ids, others, strict=False):
            dial = node.dial(Endpoint(stage, 0, node_id, where, TCP_PORT, UDP_PORT))
            await Deadline.after(LINKED_S).wait(dial, doing=f"the first link to {stage}")
        print("there", flush=True)
        if role != ASKER:
            async with running(echo(node), name="echo"):
                return await end_of_stdin()
        asker = Asker(node, ids)
        await asker.run(talks=talks)
        print(json.dumps(asker.found), flush=True)


async def echo(node: Node) -> None:
    while True:
        delivery = await node.mailbox("box").receive()
        with suppress(LinkLost):
            await node.send(Address(delivery.sender, "box"), delivery.payload)


def measure(outage_s: float, rooms: int) -> list[dict[str, Any]]:
    """Of each room, what its asker found."""
    sites = [[f"{role}-{number}" for role in (*STAGES, ASKER)] for number in range(rooms)]
    with NatLab([Site(hosts=(name,), udp="blocked") for room in sites for name in room]) as net:
        askers = []
        for place, role in enumerate((*STAGES, ASKER)):
            started = []
            for number, room in enumerate(sites):
                own, others = net.host(room[place]).own, [net.host(name).own for name in room[:place]]
                args = [sys.executable, "-m", "tests.lab.outage_table", "--child", role, own, *others]
                args += ["--talks"] if number % 2 else []
                started.append(net.node(room[place]).popen(args, stdin=PIPE))
            for process in started:
                if process.stdout.readline() != b"there\n":
                    raise RuntimeError(f"a {role} did not come up")
            askers = started
        for number, room in enumerate(sites):
            net.cut(room[0], after_s=FIRST_S + number * STEP_S)
            net.heal(room[0], after_s=FIRST_S + number * STEP_S + outage_s)
        time.sleep(FIRST_S + rooms * STEP_S + outage_s + AFTER_S)
        for process in askers:
            process.stdin.close()
        return [json.loads(process.stdout.readline()) for process in askers]


def line(outage_s: float, found: list[dict[str, Any]]) -> tuple[str, bool]:
    """What to print, and whether it is as it should be."""
    lost = [one["lost"] for one in found if one["lost"]]
    uneven = [one for one in found if not one["lost"] and one["answers"] != list(range(one["sent"]))]
    silent = sorted(one["silent_s"] for one in found)
    text = (
        f"{outage_s:5.1f} s  {len(found):3d} rooms  {len(lost):3d} lost  silent {silent[0]:.1f} to {silent[-1]:.1f} s"
    )
    text += f"  {sum(len(one['answers']) for one in found):,} answers, {len(uneven)} rooms with one twice or never"
    return "\n".join([text, *(f"    {cause}" for cause in lost[:1])]), not lost and not uneven


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outages", type=float, nargs="+", default=[6.0, 8.0, 9.0], help="seconds (default 6 8 9)")
    parser.add_argument("--rooms", type=int, default=6, help="per length (default 6, at most 8)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--talks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        role, host, *others = options.child
        asyncio.run(child(role, host, others, talks=options.talks))
        return 0
    if why_not():
        print(f"no lab here: {why_not()}", file=sys.stderr)
        return 1
    fine = True
    for outage_s in options.outages:
        text, as_wished = line(outage_s, measure(outage_s, options.rooms))
        print(text, flush=True)
        fine = fine and as_wished
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
