"""What a pure core needs of the world: a clock that is told the time, timers, and a list of things to be done.

The clock is the core's own time: it stands still while this process does. A timer that comes late by more than a
second means a freeze (a suspended laptop, a starved container); own time then goes on where it stopped, so every
deadline moves by the lag and nobody is judged by silence that was ours.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from ppsmoke.cluster.swim_state import Command, Config, Event, Send, Timer, Via, Woke


class Effects:
    """One per core. Every input begins with begin() and ends with take()."""

    def __init__(self, config: Config, rng: Random) -> None:
        self.config = config
        self.rng = rng
        self.now = 0  # own time
        self._world = 0  # the driver's time of the current input
        self._frozen = 0  # how far own time is behind it
        self._woke_at: int | None = None  # own time
        self._timers: dict[int, tuple[int, Callable[..., None], tuple[Any, ...]]] = {}  # by token: own time, and a call
        self._last_token = 0
        self._commands: list[Command] = []

    def begin(self, world: int) -> None:
        """The driver's clock, which must not go back; if it does, it stands."""
        if world > self._world:
            self._world, self.now = world, world - self._frozen

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def send(self, to: str, payload: bytes, via: Via) -> None:
        self._commands.append(Send(to, payload, via))

    def emit(self, event: Event) -> None:
        self._commands.append(event)

    def arm(self, delay: int, callback: Callable[..., None], *args: Any) -> int:
        """A timer that fires once; the token cancels it."""
        self._last_token += 1
        token, due = self._last_token, self.now + delay if delay > 0 else self.now
        self._timers[token] = due, callback, args
        self._commands.append(Timer(due + self._frozen, token))
        return token

    def cancel(self, token: int | None) -> None:
        """The token is inert from now on."""
        if token is not None:
            self._timers.pop(token, None)

    def cancel_all(self) -> None:
        self._timers.clear()

    def fire(self, world: int, token: int) -> int:
        """Run the timer if it is due. Returns how long we were frozen before it, 0 as a rule."""
        armed = self._timers.get(token)
        last_world = self._world
        self.begin(world)
        if armed is None:
            return 0
        frozen = 0
        due, callback, args = armed
        if self.now - due > self.config.lag_limit:
            frozen = max(self._world - last_world, self.now - due)
            self._frozen += frozen
            self.now -= frozen
            self._woke_at = self.now
            self.emit(Woke(frozen))
        if due > self.now:
            self._commands.append(Timer(due + self._frozen, token))
        else:
            del self._timers[token]
            callback(*args)
        return frozen

    def grace_left(self) -> int:
        """Time in which nobody is judged, because we have only just woken."""
        if self._woke_at is None:
            return 0
        return max(0, self._woke_at + self.config.wake_grace - self.now)
