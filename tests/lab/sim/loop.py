"""An asyncio event loop of one simulated machine: its own ready queue and clock; time and network are the world's.

What runs in it is the product's code as it stands. A frozen machine's loop does not turn; a suspended one's clock
stands still besides (CLOCK_MONOTONIC does), so that its timers come later by as much.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.lab.sim.datagrams import DatagramTransport
from tests.lab.sim.streams import Listening, StreamSocket
from tests.lab.sim.transports import StreamTransport, secure
from tests.lab.sim.world import World

TICK_S = 1e-6


class SimFuture(asyncio.Future):
    """With a hash that does not depend on an address: sets of futures have the same order in each run."""

    def __init__(self, *, loop: MachineLoop) -> None:
        super().__init__(loop=loop)
        loop.serial = self.serial = loop.serial + 1

    def __hash__(self) -> int:
        return self.serial


class SimTask(asyncio.Task):
    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, loop: MachineLoop, name: str | None = None) -> None:
        loop.serial = self.serial = loop.serial + 1
        super().__init__(coroutine, loop=loop, name=name or f"task {self.serial}")

    def __hash__(self) -> int:
        return self.serial


class Handle:
    """A call that is due now, or at `when` by its loop's clock. asyncio's own does more, for debugging."""

    __slots__ = ("args", "callback", "context", "when")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context, when: float = 0.0
    ) -> None:
        self.callback: Callable[..., Any] | None = callback  # None: cancelled
        self.args = args
        self.context = context
        self.when = when

    def cancel(self) -> None:
        self.callback, self.args = None, ()


class MachineLoop(asyncio.AbstractEventLoop):
    def __init__(self, world: World, machine: Any) -> None:
        self.machine = machine
        self.asleep = False  # frozen: nothing runs
        self.slept_s = 0.0  # how far its clock is behind the world's
        self.errors: list[str] = machine.errors  # what nobody caught
        self._world = world
        self._context = contextvars.copy_context()  # of whatever has none of its own: one does, nothing nests
        self._ready: deque[Handle] = deque()
        self._held: list[Handle] = []  # due while asleep
        self._floor = 0.0  # a timer that has fired is never early, whatever floating point makes of it
        self._listed = False
        self.serial = 0  # of the latest future or task
        self._tasks: list[weakref.ref[SimTask]] = []

    def move_to(self, world: World) -> None:
        """From now on its time is that world's."""
        for when, arguments in self._world.due(self._fire):
            world.at(when, self._fire, *arguments)
        self._world, self.asleep = world, False
        self._listed = False
        if self._ready:
            self._list()

    # --- the clock

    def time(self) -> float:
        now = self._world.now - self.slept_s
        return now if now > self._floor else self._floor

    def turn(self) -> None:
        """Everything that is ready now, once."""
        if self.asleep:
            self._listed = False
            return
        if World.turning is not self:  # telling asyncio costs as much as a turn
            World.turning = self
            events._set_running_loop(self)
        ready = self._ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            callback = handle.callback
            if callback is not None:
                try:
                    handle.context.run(callback, *handle.args)
                except Exception as error:  # as asyncio does: the loop goes on, the run is told
                    what = getattr(callback, "__qualname__", type(callback).__name__)  # no address: the trace replays
                    self.call_exception_handler({"message": f"in {what}", "exception": error})
        if ready:
            self._world.awake.append(self)
        else:
            self._listed = False

    def wake(self, *, clock_stood_still_s: float) -> None:
        """After a freeze. What came over the network is read first, then the timers that are overdue fire."""
        self.asleep = False
        self.slept_s += clock_stood_still_s
        held, self._held = self._held, []
        if clock_stood_still_s:
            for handle in held:
                self._world.at(handle.when + self.slept_s, self._fire, handle)
        else:
            for handle in sorted(held, key=lambda handle: handle.when):
                self._ready.append(handle)
                self._floor = max(self._floor, handle.when)
        if self._ready:
            self._list()

    def _list(self) -> None:
        if not self._listed:
            self._listed = True
            self._world.awake.append(self)

    def _fire(self, handle: Handle) -> None:
        if handle.callback is None:
            return
        when = handle.when
        if self.asleep:
            self._held.append(handle)
        elif when + self.slept_s > self._world.now:
            self._world.at(when + self.slept_s, self._fire, handle)
        else:
            if when > self._floor:
                self._floor = when
            self._ready.append(handle)
            self._list()

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        handle = Handle(callback, args, context or self._context)
        self._ready.append(handle)
        if not self._listed:
            self._listed = True
            self._world.awake.append(self)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        own = self._world.now - self.slept_s
        when = (own if own > self._floor else self._floor) + delay
        return self._schedule(Handle(callback, args, context or self._context, when))

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        return self._schedule(Handle(callback, args, context or self._context, when))

    def _schedule(self, handle: Handle) -> Handle:
        world = self._world
        # Calling anything takes time: else a wait of a rounding error would go on for ever.
        when, soonest = handle.when + self.slept_s, world.now + TICK_S
        world.at(when if when > soonest else soonest, self._fire, handle)
        return handle

    # --- futures and errors

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None) -> SimTask:
        task = SimTask(coro, loop=self, name=name)
        self._tasks.append(weakref.ref(task))
        return task

    def tasks(self) -> list[SimTask]:
        """Those that have not ended, in the order of their making. asyncio would look through those of all loops."""
        known = [task for reference in self._tasks if (task := reference()) is not None and not task.done()]
        self._tasks = [weakref.ref(task) for task in known]
        return known

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")
        self._world.note("ERROR", self.machine.name, detail=self.errors[-1])

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    # --- sockets

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    async def sock_connect(self, sock: StreamSocket, address: tuple[str, int]) -> None:
        await sock.connect(address)

    async def sock_accept(self, sock: Listening) -> tuple[StreamSocket, tuple[str, int]]:
        return await sock.accept()

    async def sock_recv(self, sock: StreamSocket, count: int) -> bytes:
        return await sock.receive(count)

    async def sock_recv_into(self, sock: StreamSocket, buffer: bytearray) -> int:
        data = await sock.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    async def sock_sendall(self, sock: StreamSocket, data: bytes) -> None:
        await sock.send_all(bytes(data))

    def remove_reader(self, sock: Any) -> bool:
        return True

    async def create_connection(self, factory: Callable[[], Any], *, sock: StreamSocket, ssl: Any, **_: Any):
        return await self._over(sock, factory, ssl)

    async def connect_accepted_socket(self, factory: Callable[[], Any], sock: StreamSocket, *, ssl: Any):
        return await self._over(sock, factory, ssl)

    async def _over(self, sock: StreamSocket, factory: Callable[[], Any], context: Any) -> tuple[Any, Any]:
        protocol = factory()
        try:
            shown = await secure(sock, context)
        except BaseException:
            sock.close()
            raise
        return StreamTransport(self, sock, protocol, shown), protocol

    async def create_datagram_endpoint(self, factory: Callable[[], Any], *, local_addr: tuple[str, int]):
        transport = DatagramTransport(self, factory(), local_addr)
        return transport, transport.protocol
