"""A mailbox: messages in the order of their arrival, and a bound beyond which their senders are told to wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ppsmoke.cluster.addresses import Delivery

MAILBOX_BYTES = 32 << 20  # waiting to be received; beyond it nothing more is acknowledged, so a sender's window closes


class Mailbox:
    def __init__(self, name: str, *, on_room: Callable[[], None] = lambda: None) -> None:
        """on_room is called when a mailbox that was full has room again."""
        self.name = name
        self._on_room = on_room
        self._waiting: deque[Delivery] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= MAILBOX_BYTES

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._bytes += len(delivery.payload)
        self._wake_one()

    async def receive(self) -> Delivery:
        """The oldest message; waits for one, the caller has the deadline. A cancelled receive loses nothing."""
        while not self._waiting:
            future = asyncio.get_running_loop().create_future()
            self._receivers.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._wake_one()  # woken and cancelled at once: the message is the next one's
                raise
        was_full = self.full
        delivery = self._waiting.popleft()
        self._bytes -= len(delivery.payload)
        if was_full and not self.full:
            self._on_room()
        return delivery

    def _wake_one(self) -> None:
        while self._receivers:
            future = self._receivers.popleft()
            if not future.done():
                future.set_result(None)
                return
