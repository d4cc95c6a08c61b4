"""What a node takes from the machine under it besides its event loop: clocks, chance, sockets, TLS.

The default is this machine. The simulator (tests/lab) brings one whose time is a number and whose chance has a seed;
Deadline and asyncio's own waits follow the running loop's clock.
"""

from __future__ import annotations

import random
import secrets
import socket
import ssl
import time

from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.raw_sockets import listening_socket, reusing_socket, stream_socket


class Machine:
    def epoch_ms(self) -> int:
        """Wall clock: names a life of a node. It may have gone back since the last one."""
        return time.time_ns() // 1_000_000

    def boot_us(self) -> int:
        """A clock that goes on while the machine sleeps, so that a suspended laptop notices it."""
        clock_id = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
        if clock_id is None:
            return time.monotonic_ns() // 1000
        return time.clock_gettime_ns(clock_id) // 1000

    def random(self) -> random.Random:
        """A generator for jitter and the like; nothing of it need be secret."""
        return random.Random()

    def token(self, count: int) -> bytes:
        """Bytes that nobody can guess."""
        return secrets.token_bytes(count)

    def tls_context(self, identity: Identity, *, side: str) -> ssl.SSLContext:
        return identity.tls_context(side=side)

    def stream_socket(self, family: int) -> socket.socket:
        """A non-blocking TCP socket, for loop.sock_connect."""
        return stream_socket(family)

    def listening_socket(self, host: str, port: int) -> socket.socket:
        return listening_socket(host, port)

    def reusing_socket(self, family: int, port: int) -> socket.socket:
        return reusing_socket(family, port)
