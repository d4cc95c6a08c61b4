"""`python -m tests.lab.attacker KIND PORT`: floods a node on this machine, from an address of its own (127.0.0.2).

silent: connections that say nothing. half-open: a member's preambles, each with half a ClientHello behind it. replay:
one preamble, again and again. datagrams: random ones, every other with the right magic. It says when it has begun.
"""

from __future__ import annotations

import argparse
import random
import secrets
import selectors
import socket
import ssl
import time
from collections import deque

from ppsmoke.cluster.handshake import LinkKind, Preamble, preamble_key
from ppsmoke.cluster.seal import MAGIC

SOURCE = "127.0.0.2"
HELD = 200  # connections that are open at once
PACE_S = 0.0005  # after each connection; 2,000 a second
BURST, BURST_PACE_S = 20, 0.001  # datagrams, and the pause after so many: 20,000 a second


def half_a_client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_bio(incoming, outgoing).do_handshake()
    except ssl.SSLWantReadError:
        pass
    hello = outgoing.read()
    return hello[: len(hello) // 2]


class Openings:
    """What each connection says first."""

    def __init__(self, kind: str, key: bytes, target: str) -> None:
        self._kind = kind
        self._key = preamble_key(key)
        self._target = target
        self._hello = half_a_client_hello()
        self._one = self._preamble(0)

    def next(self, number: int) -> bytes:
        if self._kind == "silent":
            return b""
        return (self._one if self._kind == "replay" else self._preamble(number)) + self._hello

    def _preamble(self, number: int) -> bytes:
        source = f"{number + 1:016x}"
        return Preamble(LinkKind.DIRECT, source, self._target, secrets.token_bytes(16)).seal(self._key)


def connect_all(port: int, count: int, openings: Openings) -> int:
    """How many of them the node has hung up on by the end."""
    held: deque[socket.socket] = deque()
    dropped = 0
    with selectors.DefaultSelector() as selector:
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", port), source_address=(SOURCE, 0))
            sock.sendall(openings.next(number))
            sock.setblocking(False)
            held.append(sock)
            selector.register(sock, selectors.EVENT_READ)
            while len(held) > HELD:
                oldest = held.popleft()
                selector.unregister(oldest)
                oldest.close()
            time.sleep(PACE_S)
        dropped = len(selector.select(0.5))
    for sock in held:
        sock.close()
    return dropped


def send_all(port: int, count: int) -> None:
    generator = random.Random(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((SOURCE, 0))
        for number in range(count):
            noise = generator.randbytes(generator.randrange(20, 1200))
            sock.sendto(MAGIC + noise if number % 2 else noise, ("127.0.0.1", port))
            if number % BURST == 0:
                time.sleep(BURST_PACE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["silent", "half-open", "replay", "datagrams"])
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--key", type=bytes.fromhex, default=bytes(32), help="the cluster's key, of a member")
    parser.add_argument("--target", default="f" * 16, help="the node's id")
    arguments = parser.parse_args()
    openings = Openings(arguments.kind, arguments.key, arguments.target)
    print("begun", flush=True)
    if arguments.kind == "datagrams":
        send_all(arguments.port, arguments.count)
    else:
        print(connect_all(arguments.port, arguments.count, openings), "dropped", flush=True)


if __name__ == "__main__":
    main()
