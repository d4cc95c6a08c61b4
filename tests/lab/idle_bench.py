"""What a frame costs after an idle gap, over a real distance: issue 4, "Latency". Two nodes in the lab, no load.

python -m tests.lab.idle_bench [--rtt-ms 120] [--idle-s 1.5] [--path direct|relayed] [--default bbr] [--ours cubic]:
a table, sizes by with and without fillers, in round trips: of the distance, and of what a tiny message takes on that
path. The link has carried such frames before: TCP opens its window by use. --default is the hosts' congestion control,
--ours what our sockets choose instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

from ppsmoke.cluster import link as link_module
from ppsmoke.cluster import raw_sockets
from ppsmoke.cluster.addresses import Address, Endpoint
from ppsmoke.cluster.identity import RunAuthority
from tests.lab.cluster import RUN_KEY, lab
from tests.lab.nat_lab.expected import Cell
from tests.lab.nat_lab.lab import PIPE, NatLab
from tests.lab.nat_lab.spec import TCP_PORT, sites_of

SIZES = (16, 4 << 10, 16 << 10, 64 << 10)
ROUNDS = 8
DEFAULT_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
WARM_UP = 6  # messages of the same size, one after the other


async def echo(role: str, dial: dict | None, congestion: tuple[str, str]) -> None:
    """A node that answers each message by one byte, until stdin ends."""
    use_congestion_control(*congestion)
    async with lab() as cluster:
        node = await cluster.node(role, tcp=("0.0.0.0", TCP_PORT))
        print("listening", flush=True)
        if dial:
            await node.dial(Endpoint(**dial))
        mailbox = node.mailbox("measure")
        while True:
            delivery = await mailbox.receive()
            await node.send(Address(delivery.sender, "answer"), b"!")


def use_congestion_control(default: str, ours: str) -> None:
    """default: what sockets of this host, which is the lab's, get that choose nothing ("": as the machine has it)."""
    if default:
        DEFAULT_CONGESTION_CONTROL.write_text(default)
    raw_sockets.CONGESTION_CONTROLS = (ours,)


async def measure(peer: dict, dial: dict | None, idle_s: float, warm: bool, congestion: tuple[str, str]) -> None:
    use_congestion_control(*congestion)
    if not warm:
        link_module.WARM_S = 0.0
    async with lab() as cluster:
        node = await cluster.node("orchestrator", tcp=("0.0.0.0", TCP_PORT))
        await node.dial(Endpoint(**(dial or peer)))
        to, answers = Address(peer["node_id"], "measure"), node.mailbox("answer")
        times: dict[int, list[float]] = {}
        for size in SIZES:
            for _ in range(WARM_UP):
                await node.send(to, bytes(size))
                await answers.receive()
            for _ in range(ROUNDS):
                await asyncio.sleep(idle_s + random.uniform(0, 0.2))  # any phase of the fillers
                began = time.monotonic()
                await node.send(to, bytes(size))
                await answers.receive()
                times.setdefault(size, []).append(time.monotonic() - began)
        path = next(link.path for link in node.links() if link.peer == peer["node_id"])
        print(json.dumps({"path": path, "times": times}), flush=True)


def bench(rtt_ms: float, idle_s: float, path: str, congestion: tuple[str, str], *, warm: bool) -> dict:
    authority = RunAuthority(RUN_KEY)
    cell = Cell(stage_0="nat-fully-random" if path == "relayed" else "open", home="nat-preserving", stage_1="open")
    with NatLab(sites_of(cell)) as built:
        for name in ("home", "stage-0"):
            built.edge(name).set(delay_ms=rtt_ms / 4)

        def endpoint(name: str, role: str) -> dict:
            host = built.host(name)
            node_id = authority.mint(role).node_id
            return {"role": role, "generation": 0, "node_id": node_id, "host": host.public, "tcp_port": TCP_PORT}

        peer = endpoint("stage-0", "stage-0-of-2") | {"udp_port": None}
        relay = endpoint("stage-1", "stage-1-of-2") | {"udp_port": None} if path == "relayed" else None
        processes = []
        for name, role, dial in (("stage-1", "stage-1-of-2", None), ("stage-0", "stage-0-of-2", relay)):
            command = [sys.executable, "-m", "tests.lab.idle_bench", "--echo", json.dumps([role, dial, congestion])]
            process = built.node(name).popen(command, stdin=PIPE, stdout=PIPE)
            process.stdout.readline()
            processes.append(process)
        task = json.dumps([peer, relay, idle_s, warm, congestion])
        command = [sys.executable, "-m", "tests.lab.idle_bench", "--measure", task]
        home = built.node("home").popen(command, stdin=PIPE, stdout=PIPE)
        answer = json.loads(home.stdout.readline())
        for process in (*processes, home):
            process.kill()
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rtt-ms", type=float, default=120.0)
    parser.add_argument("--idle-s", type=float, default=1.5)
    parser.add_argument("--path", choices=("direct", "relayed"), default="direct")
    parser.add_argument("--default", default="", help="the hosts' congestion control (default: this machine's)")
    parser.add_argument("--ours", default="cubic", help="the first choice of our sockets (cubic)")
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        asyncio.run(echo(*json.loads(options.echo)))
    elif options.measure:
        asyncio.run(measure(*json.loads(options.measure)))
    else:
        for warm in (False, True):
            congestion = (options.default, options.ours)
            result = bench(options.rtt_ms, options.idle_s, options.path, congestion, warm=warm)
            tiny_s = statistics.median(result["times"].pop(str(SIZES[0])))
            words = f"{result['path']}, {'with' if warm else 'without'} fillers"
            print(f"{words}, {SIZES[0]:3} bytes: p50 {tiny_s * 1000 / options.rtt_ms:.2f} RTT", flush=True)
            for size, times in result["times"].items():
                p50_s = statistics.median(times)
                trips = [seconds * 1000 / options.rtt_ms for seconds in (p50_s, max(times))]
                figures = f"p50 {trips[0]:.2f} RTT, worst {trips[1]:.2f}; {p50_s / tiny_s:.2f} of a tiny message's time"
                print(f"{words}, {int(size) >> 10:3} KiB:   {figures}", flush=True)


if __name__ == "__main__":
    main()
