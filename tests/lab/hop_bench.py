"""What a hop costs when nothing is computed: `python -m tests.lab.hop_bench [--width 2048] [--rounds 1000] [--share]`.

One hop: a decode step's activation leaves one node (codec, TLS link over loopback), is forwarded by the other node's
worker process (bridge: JSON with base64 through pipes), and comes back the same way. The parts are measured apart.
--share: its share of a decode step as well, of a real run of the default model over two stages on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import binascii
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.cluster.node import Node
from ppsmoke.keys import derive, new_run_key
from ppsmoke.pipeline.bridge import Bridge
from ppsmoke.pipeline.messages import StageActivation, decode, encode
from ppsmoke.pipeline.operations import Hidden, Operations
from tests.lab import stage_nodes, still_worker

WARM_UP = 50
ECHO_ROLE = "stage-1-of-2"


def activation(width: int, position: int = 1) -> StageActivation:
    return StageActivation(
        request_id=1,
        position=position,
        seq_len=1,
        hidden_dim=width,
        dtype="bfloat16",
        is_prefill=False,
        last_chunk=True,
        max_tokens=0,
        compute_us=(100,),
        hidden=os.urandom(width * 2),
    )


def node_for(authority: RunAuthority, cluster_key: bytes, role: str):
    return Node.listening(
        authority.mint(role), cluster_key=cluster_key, code_hash="bench", model="bench", may_own=lambda name, role: True
    )


def worker_environment(width: int, rounds: int) -> dict[str, str]:
    sizes = {"STILL_DIM": str(width), "STILL_CONTEXT": str(10 * (rounds + WARM_UP))}
    return {"PATH": os.environ["PATH"], "STAGE": "1", "NUM_STAGES": "3", **sizes}


async def start_worker(width: int, rounds: int) -> tuple[Bridge, Operations]:
    bridge = await Bridge.start(
        worker_environment(width, rounds), stage=1, on_progress=lambda line: None, target=still_worker.TARGET
    )
    await bridge.ready
    return bridge, Operations(bridge, stage=1)


async def echo(run_key: bytes, width: int, rounds: int) -> None:
    """The other node: sends back what comes to "link" as it is, and what comes to "hop" through its worker."""
    bridge, operations = await start_worker(width, rounds)
    async with node_for(RunAuthority(run_key), derive(run_key, "cluster"), ECHO_ROLE) as node:
        link, hop = node.mailbox("link"), node.mailbox("hop")
        print(json.dumps([node.node_id, node.tcp_port, node.udp_port]), flush=True)

        async def serve_link() -> None:
            while True:
                delivery = await link.receive()
                await node.send(type(node.address("link"))(delivery.sender, "link"), delivery.payload)

        async def serve_hop() -> None:
            position = 0
            while True:
                delivery = await hop.receive()
                message = decode(delivery.payload)
                hidden = await operations.forward(1, Hidden(message.hidden, message.dtype, 1), position)
                position += 1
                back = activation_with(message, hidden)
                await node.send(type(node.address("hop"))(delivery.sender, "hop"), encode(back))

        tasks = [asyncio.ensure_future(serve_link()), asyncio.ensure_future(serve_hop())]
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
    await bridge.close()


def activation_with(message: StageActivation, hidden: Hidden) -> StageActivation:
    fields = {**vars(message), "hidden": hidden.data, "compute_us": (*message.compute_us, hidden.compute_us)}
    return StageActivation(**fields)


async def timed(rounds: int, once: Callable[[], Awaitable[None]]) -> list[float]:
    """Microseconds of each round, after a warm-up."""
    for _ in range(WARM_UP):
        await once()
    figures = []
    for _ in range(rounds):
        began = time.perf_counter()
        await once()
        figures.append((time.perf_counter() - began) * 1e6)
    return figures


def show(what: str, figures: list[float]) -> None:
    p50, p99 = statistics.median(figures), statistics.quantiles(figures, n=100)[98]
    print(f"{what:<62} p50 {p50:7.0f} us   p99 {p99:7.0f} us", flush=True)


async def measure_parts(width: int, rounds: int) -> None:
    message = activation(width)
    data = encode(message)

    async def codec() -> None:
        decode(encode(message))

    async def json_and_base64() -> None:  # of a call: the request out, a reply of the same size in; the node's side
        text = binascii.b2a_base64(message.hidden, newline=False).decode("ascii")
        line = json.dumps({"op": "forward", "request_id": 1, "position": 1, "hidden_b64": text}).encode()
        binascii.a2b_base64(json.loads(line)["hidden_b64"])

    show(f"codec: encode and decode, {len(data)} bytes", await timed(rounds, codec))
    show("JSON and base64 of one call, the node's side", await timed(rounds, json_and_base64))
    bridge, operations = await start_worker(width, rounds)
    position = 0

    async def call() -> None:
        nonlocal position
        await operations.forward(1, Hidden(message.hidden, "bfloat16", 1), position)
        position += 1

    try:
        show("bridge: one call, there and back, the still worker's JSON too", await timed(rounds, call))
    finally:
        await bridge.close()


async def measure_hop(width: int, rounds: int) -> None:
    run_key = new_run_key()
    other = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.lab.hop_bench", "--echo", run_key.hex(), "--width", str(width), "--rounds", str(rounds)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        node_id, tcp_port, udp_port = json.loads(await other.stdout.readline())
        async with node_for(RunAuthority(run_key), derive(run_key, "cluster"), "orchestrator") as node:
            await node.dial(Endpoint(ECHO_ROLE, 0, node_id, "127.0.0.1", tcp_port, udp_port))
            address, message = type(node.address("link")), activation(width)
            data = encode(message)

            async def link() -> None:
                await node.send(address(node_id, "link"), data)
                await node.mailbox("link").receive()

            async def hop() -> None:
                await node.send(address(node_id, "hop"), encode(message))
                decode((await node.mailbox("hop").receive()).payload)

            show("TLS link: there and back, two processes", await timed(rounds, link))
            show("one hop: codec, link, bridge, worker, and back", await timed(rounds, hop))
    finally:
        other.stdin.close()
        await other.wait()


async def measure_loop(width: int, rounds: int) -> None:
    """The real thing: two stage node processes with still workers, one token after the other."""
    sizes = {"STILL_DIM": str(width), "STILL_CONTEXT": str(rounds + 100)}
    with tempfile.TemporaryDirectory() as folder:
        async with stage_nodes.lab(Path(folder), 2, **sizes) as lab:
            await lab.gather()
            await lab.request("Say hello", max_tokens=rounds)
            answer = await lab.outcome(within_s=120)
    figures = json.loads(answer.timings_json)["token_us"][1 + WARM_UP :]
    show("a token of two stages: two bridges, two messages, statuses", figures)


async def measure_share() -> None:
    """Of a token that two stages compute: what is left of its time without their compute, two hops."""
    command = [
        sys.executable,
        "-m",
        "ppsmoke",
        "-q",
        "--json",
        "--max-tokens",
        "64",
        "--prompt",
        "Count from one to fifty.",
    ]
    run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await run.communicate()
    timing = json.loads(output)["timing"]
    token_ms, wire_ms = timing["token_ms"]["p50"], timing["wire_ms"]["p50"]
    share = f"{wire_ms / 2:.2f} ms a hop, {wire_ms / token_ms / 2:.1%} of a decode step"
    print(f"a token of two stages that compute: p50 {token_ms:.1f} ms, two hops in it {wire_ms:.2f} ms: {share}")


async def main(width: int, rounds: int, *, share: bool) -> None:
    print(f"width {width}, bfloat16, one position; {rounds} rounds, Python {sys.version.split()[0]}")
    await measure_parts(width, rounds)
    await measure_hop(width, rounds)
    await measure_loop(width, rounds)
    if share:
        await measure_share()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--share", action="store_true", help="with a real run")
    parser.add_argument("--echo", metavar="RUN_KEY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        asyncio.run(echo(bytes.fromhex(arguments.echo), arguments.width, arguments.rounds))
    else:
        asyncio.run(main(arguments.width, arguments.rounds, share=arguments.share))
