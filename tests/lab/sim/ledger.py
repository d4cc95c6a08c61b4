"""What was sent and what came: every delivery is judged as it happens, what is missing at the end. Knows no node."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

_HEAD = struct.Struct("!BIQI")  # sender's seat, its life's number, the number of the message, bytes that follow
_BODY = bytes(range(251)) * 500


@dataclass(frozen=True)
class Life:
    """One process on one seat. number rises with every process of the room; epoch is what its node calls it."""

    seat: int
    number: int
    node_id: str
    epoch: int


@dataclass
class Flow:
    """From one life to one seat."""

    sent: dict[int, int] = field(default_factory=dict)  # message -> the receiver's epoch that it was meant for
    sent_at: dict[int, float] = field(default_factory=dict)
    last: int = 0  # the newest number that was used


@dataclass
class Heard:
    """By one life, from one seat."""

    life: int = 0  # the sender's
    message: int = 0


def encode(life: Life, message: int, size: int) -> bytes:
    start = message % 251
    return _HEAD.pack(life.seat, life.number, message, size) + _BODY[start : start + size]


class Ledger:
    def __init__(self, violation: Callable[[str], None], now: Callable[[], float]) -> None:
        self.delivered = 0
        self.refused = 0  # sends that raised LinkLost
        self.slowest_s = 0.0  # from the send's return to the delivery
        self._violation = violation
        self._now = now
        self._flows: dict[tuple[int, int], Flow] = {}  # by the sender's life and the receiver's seat
        self._heard: dict[tuple[int, int], Heard] = {}  # by the receiver's life and the sender's seat

    def flow(self, life: Life, to_seat: int) -> Flow:
        return self._flows.setdefault((life.number, to_seat), Flow())

    def sent(self, life: Life, to_seat: int, message: int, *, epoch: int) -> None:
        """The node has taken the message for that life of the receiver."""
        flow = self.flow(life, to_seat)
        flow.sent[message], flow.sent_at[message] = epoch, self._now()

    def came(self, receiver: Life, sender_id: str, payload: bytes, seat_of: Callable[[str], int]) -> None:
        seat, life, message, size = _HEAD.unpack_from(payload)
        name = f"message {message} of life {life} on seat {seat} to life {receiver.number} on seat {receiver.seat}"
        if seat_of(sender_id) != seat:
            self._violation(f"{name} is said to be of seat {seat_of(sender_id)}")
        if payload != encode(Life(seat, life, "", 0), message, size):
            self._violation(f"{name} is garbled")
        heard = self._heard.setdefault((receiver.number, seat), Heard())
        if life < heard.life:
            self._violation(f"{name} came after one of life {heard.life}")
            return
        if life > heard.life:
            heard.life, heard.message = life, 0
        if message <= heard.message:
            self._violation(f"{name} came twice or late: {heard.message} was there before")
            return
        flow = self._flows.get((life, receiver.seat))
        if flow is None or flow.sent.get(message) != receiver.epoch:
            self._violation(f"{name} was meant for another life, or never sent")
            return
        for skipped in range(heard.message + 1, message):
            if flow.sent.get(skipped) == receiver.epoch:
                self._violation(f"message {skipped} was lost: {name} came after it")
        heard.message = message
        self.delivered += 1
        self.slowest_s = max(self.slowest_s, self._now() - flow.sent_at[message])

    def check_all_came(self, living: list[Life], *, sent_before: float) -> None:
        """What was taken for a life that still lives, by one that still lives, has come."""
        for sender in living:
            for receiver in living:
                flow = self._flows.get((sender.number, receiver.seat))
                if flow is None:
                    continue
                heard = self._heard.get((receiver.number, sender.seat), Heard())
                newest = heard.message if heard.life == sender.number else 0
                missing = [
                    message
                    for message, epoch in flow.sent.items()
                    if epoch == receiver.epoch and message > newest and flow.sent_at[message] < sent_before
                ]
                if missing:
                    self._violation(
                        f"{len(missing)} messages of seat {sender.seat} never came to seat {receiver.seat}: "
                        f"number {missing[0]}, sent at {flow.sent_at[missing[0]]:.3f} s, is the first"
                    )
