"""Mailboxes: messages in the order of their arrival, and bounds beyond which their senders are told to wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from ppsmoke.cluster.addresses import Delivery
from ppsmoke.cluster.changes import Signal

MAILBOX_BYTES = 32 << 20  # waiting to be received; beyond it nothing more is acknowledged, so a sender's window closes
UNASKED_BYTES = 1 << 20  # the same, while nobody here has asked for the mailbox
MAX_UNASKED_OF_ONE = 8  # mailboxes that one sender has opened and nobody asked for; to a further one nothing is taken
_MESSAGE_COST_BYTES = 300  # what a message takes besides its payload, so that many small ones count too


class Mailbox:
    def __init__(
        self, name: str, *, opened_by: str = "", on_room: Callable[[Mailbox], None] = lambda box: None
    ) -> None:
        """on_room is called when a mailbox that was full has room again. opened_by: a sender whose message was there
        before anybody asked for the mailbox."""
        self.name = name
        self.opened_by = opened_by
        self._on_room = on_room
        self._waiting: deque[Delivery] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= (UNASKED_BYTES if self.opened_by else MAILBOX_BYTES)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._bytes += len(delivery.payload) + _MESSAGE_COST_BYTES
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
        self._bytes -= len(delivery.payload) + _MESSAGE_COST_BYTES
        if was_full and not self.full:
            self._on_room(self)
        return delivery

    def ask_for(self) -> None:
        """Somebody here reads it from now on."""
        was_full, self.opened_by = self.full, ""
        if was_full and not self.full:
            self._on_room(self)

    def _wake_one(self) -> None:
        while self._receivers:
            future = self._receivers.popleft()
            if not future.done():
                future.set_result(None)
                return


class Sender(Protocol):
    """Who can be told to wait: a peer (peer.py)."""

    def hold_acks(self) -> None: ...

    def release_acks(self) -> None: ...


class Mailboxes:
    """All of a node's: those that were asked for, and what has come for others, within bounds for each sender."""

    def __init__(self, changed: Signal) -> None:
        self.counts: Counter[str] = Counter()  # junk-mailbox: messages that were dropped
        self._changed = changed
        self._boxes: dict[str, Mailbox] = {}
        self._unasked: Counter[str] = Counter()  # boxes by who opened them
        self._held: dict[str, dict[Sender, None]] = {}  # who waits for room, by mailbox, in their order

    def ask_for(self, name: str) -> Mailbox:
        """The mailbox of that name, with what has come for it so far."""
        box = self._boxes.get(name)
        if box is None:
            box = self._boxes[name] = Mailbox(name, on_room=self._make_room)
        elif box.opened_by:
            self._unasked -= Counter([box.opened_by])  # drops what falls to zero
            box.ask_for()
        return box

    def deliver(self, sender: Sender, name: str, delivery: Delivery) -> None:
        """Dropped, and counted, if it is for yet another mailbox that nobody here has asked for."""
        box = self._boxes.get(name)
        if box is None:
            if self._unasked[delivery.sender] >= MAX_UNASKED_OF_ONE:
                self.counts["junk-mailbox"] += 1
                return
            self._unasked[delivery.sender] += 1
            box = self._boxes[name] = Mailbox(name, opened_by=delivery.sender, on_room=self._make_room)
        box.put(delivery)
        if box.full:
            sender.hold_acks()
            self._held.setdefault(name, {})[sender] = None

    def _make_room(self, box: Mailbox) -> None:
        for sender in self._held.pop(box.name, {}):
            if not any(sender in others for others in self._held.values()):
                sender.release_acks()
        self._changed.notify()
