"""TCP hole punching on plain sockets: both sides connect from a port that was seen, at the same moment, to the other's.

asyncio's open_connection sets no reuse option before it binds, so the sockets are made here and given to sock_connect.
facts/network.md, section 4.5.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from ppsmoke.cluster.raw_sockets import RawSocket, reusing_socket
from ppsmoke.errors import DeadlineExceeded, FrameError, LinkError
from ppsmoke.waiting import Deadline, cancel_and_reap

ATTEMPT_S = 4.0  # one long attempt: a SYN that is early waits for the peer's, a retry would meet a closed socket
DEADLINE_S = 6.0  # for the attempt and what repeats it after a RST
RETRY_S = (0.010, 0.050)  # after a RST, at random, so that the two do not go on missing each other
CONFIRM_S = 3.0  # to hear from whoever answered that it is the peer

OpenSocket = Callable[[int, int], socket.socket]  # address family, local port


async def punch(
    port: int,
    targets: Sequence[tuple[str, int]],
    confirm: Callable[[socket.socket], Awaitable[None]],
    *,
    rng: random.Random,
    open_socket: OpenSocket = reusing_socket,
) -> RawSocket:
    """A socket from our port to one of the peer's addresses, whose other end confirm() has found to be the peer.

    confirm raises FrameError or OSError for anybody else. Raises LinkError if none comes within DEADLINE_S."""
    tries = [
        asyncio.ensure_future(_connect(port, target, confirm, rng=rng, open_socket=open_socket)) for target in targets
    ]
    running, errors, won = set(tries), [], None
    deadline = Deadline.after(DEADLINE_S)
    try:
        while running and deadline.remaining() > 0:
            done, running = await asyncio.wait(
                running, timeout=deadline.remaining(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                try:
                    won = task.result()
                    return won
                except (LinkError, DeadlineExceeded) as error:
                    errors.append(error.cause)
        raise LinkError("; ".join(dict.fromkeys(errors)) or f"no answer through the hole within {DEADLINE_S:g} s")
    finally:
        await cancel_and_reap(*tries)
        for task in tries:  # a second winner, of the same turn
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is not won:
                task.result().close()


async def _connect(
    port: int,
    target: tuple[str, int],
    confirm: Callable[[socket.socket], Awaitable[None]],
    *,
    rng: random.Random,
    open_socket: OpenSocket,
) -> RawSocket:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    where = f"{target[0]}:{target[1]}"
    deadline = Deadline.after(ATTEMPT_S)
    while True:
        try:
            raw = RawSocket(open_socket(family, port))
        except OSError as error:
            raise LinkError(f"port {port} cannot be used for a hole: {error.strerror}") from error
        try:
            await deadline.wait(loop.sock_connect(raw.socket, target), doing=f"nobody came to {where} through the hole")
            await Deadline.after(CONFIRM_S).wait(confirm(raw.socket), doing=f"{where} did not say who it is")
            return RawSocket(raw.hand_over())
        except FrameError as error:
            raise LinkError(f"{where}: {error.cause}") from error
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET) or deadline.remaining() <= 0:
                # EADDRNOTAVAIL: the same four numbers are in use still; spinning does not free them.
                text = os.strerror(error.errno) if error.errno else str(error)
                raise LinkError(f"{where}: {text}") from error
        finally:
            raw.close()
        await asyncio.sleep(rng.uniform(*RETRY_S))
