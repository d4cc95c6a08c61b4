"""A simulated machine: addresses, NAT, sockets and clocks for one node after another, and what can befall it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Coroutine
from typing import Any

from ppsmoke.cluster.identity import Identity
from ppsmoke.cluster.machine import Machine
from ppsmoke.cluster.node import CLOSE_BUDGET_S
from ppsmoke.errors import DeadlineExceeded
from tests.lab.sim.datagrams import DatagramTransport
from tests.lab.sim.loop import MachineLoop, SimTask
from tests.lab.sim.network import Address, Nat, Network
from tests.lab.sim.streams import Listening, StreamSocket
from tests.lab.sim.transports import PlainTls, StreamTransport
from tests.lab.sim.world import World

FIRST_EPOCH_MS = 1_800_000_000_000
FIRST_FRESH_PORT = 32768
FORWARDED_TCP, FORWARDED_UDP = 41070, 41071  # what a mapped port is called outside
GHOST_S = 60.0  # a process that was killed is unwound in a time of its own, where nobody hears it


class SimMachine(Machine):
    def __init__(self, network: Network, index: int, *, nat: Nat, site: int) -> None:
        self.network = network
        self.world = network.world
        self.name = f"m{index}"
        self.index = index
        self.nat = nat
        self.site = site
        self.public = f"198.51.100.{index + 1}"
        self.ip = self.public if nat == "open" else f"192.168.{site}.{index + 1}"
        self.life = 0
        self.off = True  # no power: silence
        self.running = False  # there is a process
        self.wall_offset_ms = 0
        self.mapped_udp: Address | None = (self.public, FORWARDED_UDP) if nat == "mapped" else None
        self.loop: MachineLoop
        self.main: SimTask
        self._nat_ports: dict[tuple[int, Address], int] = {}
        self.errors: list[str] = []  # that nobody caught
        self.left_behind: list[str] = []  # by processes that have ended
        self._asleep_since: float | None = None
        self._asleep_until = 0.0
        self._woke_at = -CLOSE_BUDGET_S
        self._clock_stands = False
        self._clear()
        network.add(self)

    def __hash__(self) -> int:
        return self.index

    def _clear(self) -> None:
        self.sockets: dict[StreamSocket, None] = {}
        self.listeners: dict[int, Listening] = {}
        self.connecting: list[StreamSocket] = []
        self.transports: list[StreamTransport] = []
        self.udp_endpoints: dict[int, DatagramTransport] = {}
        self.udp_holes: dict[tuple[int, Address], float] = {}  # by own port and the other side
        self._next_port = FIRST_FRESH_PORT
        self._generators = 0
        self._tokens = self.world.random("token", self.name, self.life)

    # --- ppsmoke.cluster.machine.Machine

    def epoch_ms(self) -> int:
        return FIRST_EPOCH_MS + round(self.world.now * 1000) + self.wall_offset_ms

    def boot_us(self) -> int:
        return round(self.world.now * 1e6)

    def random(self) -> random.Random:
        self._generators += 1
        return self.world.random("node", self.name, self.life, self._generators)

    def token(self, count: int) -> bytes:
        return self._tokens.randbytes(count)

    def tls_context(self, identity: Identity, *, side: str) -> PlainTls:
        return PlainTls(identity, side)

    def stream_socket(self, family: int) -> StreamSocket:
        return StreamSocket(self)

    def listening_socket(self, host: str, port: int) -> Listening:
        return Listening(self, port)

    def reusing_socket(self, family: int, port: int) -> StreamSocket:
        return StreamSocket(self, port or self.fresh_port())

    # --- addresses

    def fresh_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def nat_port(self, port: int, remote: Address) -> int:
        """What a NAT makes of the port towards that address, where it does not keep it."""
        known = self._nat_ports.get((port, remote))
        if known is None:
            known = self._nat_ports[port, remote] = 20_000 + len(self._nat_ports)
        return known

    def listener(self, address: Address) -> Listening | None:
        """Who listens there, if its NAT lets a stranger in."""
        host, port = address
        if host == self.ip:
            return self.listeners.get(port)
        return self.listeners.get(7070) if self.nat == "mapped" and port == FORWARDED_TCP else None

    # --- what befalls it

    def boot(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A new process in a new life."""
        self.life += 1
        self._clear()
        self.off, self.running = False, True
        self._asleep_since = None
        self.loop = MachineLoop(self.world, self)
        self.world.note("boot", self.name, detail=str(self.life))
        self.loop.call_soon(self._start, main)

    def _start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.main = self.loop.create_task(main(), name="main")  # held here: asyncio itself holds no task
        life = self.life
        self.main.add_done_callback(lambda _: self.world.at(self.world.now + 0.01, self._ended, life))

    def _ended(self, life: int) -> None:
        """The process has ended by itself. Whatever it has not put away is one fault more."""
        if life != self.life:
            return
        error = self.main.exception()
        if error is None:
            left = [*self.loop.tasks(), *self.sockets, *self.listeners, *self.udp_endpoints.values()]
            self.left_behind += [f"{self.name} left behind {one!r}" for one in left]
        elif not isinstance(error, DeadlineExceeded) or self.world.now - self._woke_at > CLOSE_BUDGET_S:
            self.errors.append(f"it ended with {error!r}")
        # Else it slept while it put its things away, for longer than that may take: it says so, and is gone.
        self.kill(power=False)

    def kill(self, *, power: bool) -> None:
        """The process is gone without a word of its own. power: so is the machine, and nobody hears a RST."""
        self.world.note("power off" if power else "kill", self.name)
        sockets = list(self.sockets)
        for sock in sockets:
            if power:
                sock.vanish()
            else:
                sock.reset_peer()
            sock.error = sock.error or OSError(errno.ENETDOWN, "the machine is gone")
        self.off, self.running = power, False
        self.life += 1
        self.listeners.clear()
        for endpoint in list(self.udp_endpoints.values()):
            endpoint.close()
        self._lay_to_rest(self.loop)

    def _lay_to_rest(self, loop: MachineLoop) -> None:
        """Unwind the tasks of a process that is gone, so that Python need not. Nothing of it reaches anybody."""
        here, elsewhere = self.world, World(self.world.seed)
        elsewhere.now = here.now
        loop.move_to(elsewhere)
        for task in loop.tasks():
            task.cancel()
        elsewhere.at(elsewhere.now + GHOST_S + 1, lambda: None)
        self.world = elsewhere  # so that all its clocks go on: what waits for them would else never stop looking
        try:
            elsewhere.run(elsewhere.now + GHOST_S)
        finally:
            self.world = here
        self.left_behind += [f"a killed process on {self.name} goes on: {task!r}" for task in loop.tasks()]

    def sleep(self, seconds: float, *, clock_stands: bool) -> None:
        """Frozen (SIGSTOP, a starved host) or, if its clock stands still too, suspended."""
        if self.off:
            return
        self.world.note("suspend" if clock_stands else "freeze", self.name, detail=f"{seconds:.3f}")
        if self._asleep_since is None:
            self._asleep_since, self._clock_stands = self.world.now, clock_stands
            self.loop.asleep = True
        self._asleep_until = max(self._asleep_until, self.world.now + seconds)
        self.world.at(self.world.now + seconds, self._wake, self.life)

    def _wake(self, life: int) -> None:
        if life != self.life or self._asleep_since is None or self.world.now < self._asleep_until:
            return
        self.world.note("wake", self.name)
        slept_s = self.world.now - self._asleep_since
        self._woke_at = self.world.now
        self._asleep_since = None
        self.loop.wake(clock_stood_still_s=slept_s if self._clock_stands else 0.0)

    @property
    def is_asleep(self) -> bool:
        return self._asleep_since is not None
