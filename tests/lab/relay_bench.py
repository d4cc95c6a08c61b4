"""What the relay costs where the network costs nothing: `python -m tests.lab.relay_bench [--rounds 2000] [--mib 256]`.

Three processes on loopback: one sends, one answers each message with a byte, and a third is the relay's splice between
them, or not. Plain sockets, so that nothing but the relay makes the difference. One way: so much in messages of 4 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from struct import Struct

from ppsmoke.cluster.raw_sockets import RawSocket, listening_socket, tune
from ppsmoke.cluster.relay import GO, Splice

SIZES = (4 << 10, 64 << 10)
BULK_BYTES = 4 << 20
WARM_UP = 200
_HEAD = Struct("!I")  # bytes of the message that follows; 0: that was the last


async def relay() -> None:
    """Accepts one socket on each of two ports, which it prints, and splices them until one ends."""
    loop = asyncio.get_running_loop()
    ears = [listening_socket("127.0.0.1", 0) for _ in range(2)]
    print(*(ear.getsockname()[1] for ear in ears), flush=True)
    legs = [RawSocket((await loop.sock_accept(ear))[0]) for ear in ears]
    for leg in legs:
        leg.socket.setblocking(False)
    await Splice(*legs).run()


def answer(port: int) -> None:
    """Dials there and answers each message with a byte."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        tune(sock)
        receive(sock, len(GO))
        while (count := _HEAD.unpack(receive(sock, _HEAD.size))[0]) > 0:
            receive(sock, count)
            sock.sendall(b"!")


def receive(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    with memoryview(data) as view:
        while count:
            got = sock.recv_into(view[len(data) - count :])
            if not got:
                raise ConnectionError("the other process has hung up")
            count -= got
    return data


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.lab.relay_bench", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(sock: socket.socket, rounds: int, mib: int) -> dict[str, float]:
    """Microseconds at the median by size, and MB/s one way."""

    def send(count: int, body: bytes) -> float:
        began = time.perf_counter()
        sock.sendall(_HEAD.pack(count))
        sock.sendall(body)
        receive(sock, 1)
        return time.perf_counter() - began

    tune(sock)
    found = {}
    for size in SIZES:
        body = bytes(size)
        times = [send(size, body) for _ in range(WARM_UP + rounds)][WARM_UP:]
        found[f"{size >> 10} KiB, us"] = statistics.median(times) * 1e6
    body = bytes(BULK_BYTES)
    count = max(1, (mib << 20) // BULK_BYTES)
    seconds = sum(send(BULK_BYTES, body) for _ in range(count))
    found["one way, MB/s"] = count * BULK_BYTES / seconds / 1e6
    sock.sendall(_HEAD.pack(0))
    return found


def direct(rounds: int, mib: int) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as ear:
        other = start("--answer", str(ear.getsockname()[1]))
        with ear.accept()[0] as sock:
            sock.sendall(GO)
            found = measure(sock, rounds, mib)
    other.wait()
    return found


def relayed(rounds: int, mib: int) -> dict[str, float]:
    between = start("--relay")
    near, far = map(int, between.stdout.readline().split())
    other = start("--answer", str(far))
    with socket.create_connection(("127.0.0.1", near)) as sock:
        receive(sock, len(GO))
        found = measure(sock, rounds, mib)
    for process in (other, between):
        process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="messages of each size (2000)")
    parser.add_argument("--mib", type=int, default=256, help="one way, in all (256)")
    parser.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.relay:
        asyncio.run(relay())
    elif options.answer:
        answer(options.answer)
    else:
        without, with_it = direct(options.rounds, options.mib), relayed(options.rounds, options.mib)
        print(f"{'':16} {'direct':>8} {'relayed':>8} {'added':>8}")
        for what, value in without.items():
            added = "" if what.endswith("MB/s") else f"{with_it[what] - value:8.0f}"
            print(f"{what:16} {value:8.0f} {with_it[what]:8.0f} {added}")


if __name__ == "__main__":
    main()
