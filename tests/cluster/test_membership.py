"""The driver over real sockets on loopback, and its decisions with a clock that the test turns."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from ppsmoke.cluster.machine import Machine
from ppsmoke.cluster.membership import Membership
from ppsmoke.cluster.seal import Opener, Sealer
from ppsmoke.cluster.swim_packets import MAX_PAYLOAD_BYTES, Gossip, MemberUpdate, Packet, decode, encode
from ppsmoke.cluster.swim_state import (
    MILLISECOND,
    Config,
    Event,
    MemberChanged,
    NameChanged,
    State,
    UdpBlocked,
    UdpRestored,
)
from ppsmoke.cluster.udp_ports import UdpPorts
from ppsmoke.errors import LinkError
from ppsmoke.waiting import Deadline
from tests.lab.cluster import until

KEY = b"k" * 32
LOOPBACK = "127.0.0.1"
FAST = Config(  # the same rules, twenty times faster
    probe_period=50 * MILLISECOND,
    timeout_min=20 * MILLISECOND,
    timeout_max=100 * MILLISECOND,
    doubt=50 * MILLISECOND,
    suspicion_min=300 * MILLISECOND,
    gossip_period=10 * MILLISECOND,
    sync_period=500 * MILLISECOND,
    dead_ping_period=100 * MILLISECOND,
    join_period=50 * MILLISECOND,
)


def node_id(letter: str) -> str:
    return letter * 16


def meta_of(port: int | None) -> bytes:
    return b"" if port is None else port.to_bytes(2, "big")


def candidates(meta: bytes) -> list[tuple[str, int]]:
    return [(LOOPBACK, int.from_bytes(meta, "big"))] if meta else []


class Cluster:
    """Members "a", "b", ... in one loop; links are calls, and can be cut."""

    def __init__(self) -> None:
        self.members: dict[str, Membership] = {}
        self.events: dict[str, list[Event]] = {}
        self.linked: set[tuple[str, str]] = set()
        self.changed = asyncio.Event()

    async def add(self, stack: AsyncExitStack, letter: str, *, udp: bool = True, **how: object) -> Membership:
        events = self.events.setdefault(letter, [])

        def note(event: Event) -> None:
            events.append(event)
            self.changed.set()

        how.setdefault("config", FAST)
        member = Membership(
            node_id=node_id(letter),
            cluster_key=how.pop("key", KEY),
            link_send=lambda peer, data: self.link_send(letter, peer, data),
            on_event=note,
            udp=(LOOPBACK, 0) if udp else None,
            udp_candidates=candidates,
            **how,
        )
        await member.start()
        stack.push_async_callback(member.close)
        member.set_meta(meta_of(member.udp_port))
        self.members[letter] = member
        return member

    def link_send(self, source: str, peer: str, data: bytes) -> bool:
        if (source, peer[0]) not in self.linked:
            return False
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: self.members[peer[0]].on_link_datagram(node_id(source), data))
        return True

    def link(self, a: str, b: str) -> None:
        self.linked |= {(a, b), (b, a)}
        for x, y in ((a, b), (b, a)):
            peer = self.members[y]
            self.members[x].link_up(node_id(y), epoch=peer.epoch, meta=peer.meta_of(node_id(y)) or b"")

    async def until(self, holds: Callable[[], bool], doing: str) -> None:
        async def wait() -> None:
            while not holds():
                self.changed.clear()
                await self.changed.wait()

        await Deadline.after(20).wait(wait(), doing=doing)

    def sees(self, observer: str, subject: str, state: State) -> bool:
        return self.members[observer].state_of(node_id(subject)) is state


@asynccontextmanager
async def cluster(letters: str, **how: object):
    async with AsyncExitStack() as stack:
        made = Cluster()
        for letter in letters:
            await made.add(stack, letter, **how)
        made.stack = stack
        yield made


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(Deadline.after(30).wait(test(), doing="the test"))


def all_alive(made: Cluster) -> bool:
    letters = list(made.members)
    return all(made.sees(x, y, State.ALIVE) for x in letters for y in letters)


def test_three_nodes_find_each_other_by_a_seeds_address_and_share_names():
    async def scene() -> None:
        async with cluster("abc") as made:
            for letter in "bc":
                made.members[letter].join([(node_id("a"), (LOOPBACK, made.members["a"].udp_port))])
            made.members["c"].register("pp-entry", b"stage", generation=2)
            await made.until(lambda: all_alive(made), "three members")
            named = lambda: all(m.lookup("pp-entry") for m in made.members.values())  # noqa: E731
            await made.until(named, "the name everywhere")
            entry = made.members["b"].lookup("pp-entry")[0]
            assert (entry.owner, entry.value, entry.generation) == (node_id("c"), b"stage", 2)
            assert made.members["b"].meta_of(node_id("c")) == meta_of(made.members["c"].udp_port)
            assert [view.node_id[0] for view in made.members["b"].members()] == ["a", "b", "c"]
            assert NameChanged("pp-entry") in made.events["a"]
            made.members["c"].unregister("pp-entry")
            await made.until(lambda: not any(m.lookup("pp-entry") for m in made.members.values()), "no name")

    run(scene)


def test_a_silent_member_is_found_dead_and_a_new_life_of_it_alive_at_once():
    async def scene() -> None:
        async with cluster("abc") as made:
            for letter in "bc":
                made.members[letter].join([(node_id("a"), (LOOPBACK, made.members["a"].udp_port))])
            await made.until(lambda: all_alive(made), "three members")
            await made.members.pop("c").close()
            await made.until(lambda: made.sees("a", "c", State.DEAD) and made.sees("b", "c", State.DEAD), "a death")
            again = await made.add(made.stack, "c")
            again.join([(node_id("a"), (LOOPBACK, made.members["a"].udp_port))])
            await made.until(lambda: all_alive(made), "a new life")

    run(scene)


def test_a_member_that_leaves_is_not_mourned():
    async def scene() -> None:
        async with cluster("ab") as made:
            made.members["b"].join([(node_id("a"), (LOOPBACK, made.members["a"].udp_port))])
            await made.until(lambda: all_alive(made), "two members")
            await made.members["b"].leave(linger_s=0.05)
            await made.until(lambda: made.sees("a", "b", State.LEFT), "the leave")

    run(scene)


@pytest.mark.slow
@pytest.mark.parametrize("udp", [True, False])
def test_links_alone_carry_membership(udp):
    async def scene() -> None:
        async with AsyncExitStack() as stack:
            made = Cluster()
            config = None if udp else Config(**{**FAST.__dict__, "udp": False})
            for letter in "ab":
                member = await made.add(stack, letter, udp=udp, config=config or FAST)
                member.set_meta(b"")  # nobody knows an address of anybody
            made.link("a", "b")
            await made.until(lambda: all_alive(made), "two members")
            made.members["a"].register("n", b"v")
            await made.until(lambda: bool(made.members["b"].lookup("n")), "the name")
            assert made.members["a"].counts["opened"] == 0
            made.linked.clear()
            made.members["a"].link_down(node_id("b"))
            await made.until(lambda: made.sees("a", "b", State.DEAD), "a death")

    run(scene)


def test_strangers_get_no_answer_and_each_refusal_is_counted():
    async def scene() -> None:
        async with cluster("a") as made:
            member = made.members["a"]
            attacker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            stack = made.stack
            stack.callback(attacker.close)
            attacker.setblocking(False)
            sealed = Sealer(KEY, node_id=node_id("b"), epoch=member.epoch).seal(
                encode(Packet(0, False, Gossip(), [MemberUpdate(State.ALIVE, node_id("b"), member.epoch, 0)]))
            )
            forged = Sealer(b"x" * 32, node_id=node_id("b"), epoch=1).seal(b"")
            tampered = sealed[:-1] + bytes([sealed[-1] ^ 1])
            echo = Sealer(KEY, node_id=node_id("a"), epoch=1).seal(b"")
            for datagram in (b"noise", bytes(200), forged, tampered, echo, sealed, sealed):
                attacker.sendto(datagram, (LOOPBACK, member.udp_port))
            await made.until(lambda: made.sees("a", "b", State.ALIVE), "the one honest datagram")
            while member.counts["replayed"] == 0:
                await asyncio.sleep(0.005)  # a refusal is counted, it is no event
            counts = member.counts
            assert (counts["too-short"], counts["wrong-magic"], counts["wrong-tag"]) == (1, 1, 2)
            assert (counts["own-echo"], counts["replayed"], counts["opened"]) == (1, 1, 1)

    run(scene)


def test_replies_go_to_where_the_newest_datagram_came_from():
    async def scene() -> None:
        async with cluster("a") as made:
            member = made.members["a"]
            sealer = Sealer(KEY, node_id=node_id("b"), epoch=member.epoch)
            hello = encode(Packet(0, False, Gossip(), [MemberUpdate(State.ALIVE, node_id("b"), member.epoch, 0)]))
            loop = asyncio.get_running_loop()
            first, second = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
            for peer in (first, second):
                made.stack.callback(peer.close)
                peer.setblocking(False)
                peer.bind((LOOPBACK, 0))
                peer.sendto(sealer.seal(hello), (LOOPBACK, member.udp_port))
                opened = Opener(KEY, node_id=node_id("b")).open(await loop.sock_recv(peer, 2048))
                assert opened.sender == node_id("a") and decode(opened.payload)

    run(scene)


class Nat:
    """A translator before a port: a socket per source, until a source's mapping is dead."""

    def __init__(self, stack: AsyncExitStack, port: int) -> None:
        self._loop, self._target = asyncio.get_running_loop(), (LOOPBACK, port)
        self._stack = stack
        self.dead: set[int] = set()
        self.flows: dict[int, socket.socket] = {}  # by the source's port
        self._outer = self._socket(lambda: self._forward(*self._outer.recvfrom(2048)))
        self.port = self._outer.getsockname()[1]

    def _socket(self, on_datagram: Callable[[], None]) -> socket.socket:
        made = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.bind((LOOPBACK, 0))
        made.setblocking(False)
        self._loop.add_reader(made, on_datagram)
        self._stack.callback(self._loop.remove_reader, made)
        return made

    def _forward(self, data: bytes, source: tuple[str, int]) -> None:
        if source[1] in self.dead:
            return
        if source[1] not in self.flows:
            self.flows[source[1]] = self._socket(lambda: self._back(source))
        self.flows[source[1]].sendto(data, self._target)

    def _back(self, source: tuple[str, int]) -> None:
        data = self.flows[source[1]].recv(2048)
        if source[1] not in self.dead:
            self._outer.sendto(data, source)


def test_when_a_mapping_is_dead_and_stays_so_a_fresh_source_port_gets_through():
    silent = dataclasses.replace(FAST, udp_silence=200 * MILLISECOND)

    async def scene() -> None:
        async with cluster("ab", config=silent) as made, AsyncExitStack() as stack:
            a, b = made.members["a"], made.members["b"]
            nat = Nat(stack, b.udp_port)
            for member in (a, b):
                member.set_meta(b"")  # the only way is through the NAT
            made.link("a", "b")
            a.join([(node_id("b"), (LOOPBACK, nat.port))])
            await until(lambda: a._core.path(node_id("b")).udp_answered, doing="an answer through the NAT")
            nat.dead.add(a.udp_port)
            seen = made.events["a"]
            await made.until(lambda: UdpRestored(node_id("b")) in seen, "UDP on a fresh port")
            assert any(isinstance(event, UdpBlocked) for event in seen)
            assert set(nat.flows) - {a.udp_port} and all_alive(made)
            assert not any(isinstance(event, MemberChanged) and event.new is not State.ALIVE for event in seen)

    run(scene)


def test_a_fresh_port_is_not_followed_by_another_at_once():
    async def scene() -> None:
        ports = UdpPorts(lambda data, source, port: None)
        ports.want_fresh()  # where there is no UDP at all, there is none
        await ports.open((LOOPBACK, 0))
        for _ in range(3):
            ports.want_fresh()
            await asyncio.wait({ports._opening})
            first = ports.fresh
        assert ports.fresh is first and first.get_extra_info("sockname")[1] != ports.number
        await ports.close()

    run(scene)


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(8), bytes(8) + b"\xff" * 100, bytes(MAX_PAYLOAD_BYTES + 9)])
def test_noise_over_a_link_is_refused(data):
    async def scene() -> None:
        async with cluster("a") as made:
            member = made.members["a"]
            member.on_link_datagram(node_id("b"), data)
            assert sum(member.counts.values()) == 1 and len(member.members()) == 1

    run(scene)


@pytest.mark.parametrize("address", [("0.0.0.0", 5), ("example.org", 5), (LOOPBACK, 0), ("224.0.0.1", 5), ("::", 5)])
def test_addresses_that_cannot_be_a_peers_are_not_used(address):
    async def scene() -> None:
        async with cluster("a") as made:
            member = made.members["a"]
            member.join([(node_id("b"), address)])
            assert member.counts["unreachable"] >= 1 and len(member.members()) == 1

    run(scene)


def test_a_port_that_is_taken_is_one_clear_error():
    async def scene() -> None:
        async with cluster("a") as made:
            taken = made.members["a"].udp_port
            second = Membership(
                node_id=node_id("b"), cluster_key=KEY, link_send=lambda peer, data: False, on_event=print,
                udp=(LOOPBACK, taken),
            )  # fmt: skip
            with pytest.raises(LinkError, match=f"cannot listen on UDP {LOOPBACK}:{taken}"):
                await second.start()

    run(scene)


def test_a_machine_that_was_suspended_judges_nobody_by_its_own_sleep():
    async def scene() -> None:
        class Laptop(Machine):
            slept_us = 0

            def boot_us(self) -> int:
                return super().boot_us() + self.slept_us

        laptop = Laptop()

        async with AsyncExitStack() as stack:
            made = Cluster()
            for letter in "ab":
                await made.add(stack, letter, config=Config(), **({"machine": laptop} if letter == "a" else {}))
            made.link("a", "b")
            await made.until(lambda: all_alive(made), "two members")
            laptop.slept_us = 3600 * 1_000_000
            made.members["a"].note_life(node_id("b"))  # whatever comes first, a frame or a timer
            woke = [event for event in made.events["a"] if type(event).__name__ == "Woke"]
            assert len(woke) == 1 and made.sees("a", "b", State.ALIVE)
            changes = [e for e in made.events["a"] if isinstance(e, MemberChanged) and e.new is not State.ALIVE]
            assert changes == []

    run(scene)


def test_closing_leaves_no_socket_and_no_timer():
    async def scene() -> None:
        async with cluster("a") as made:
            port = made.members["a"].udp_port
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind((LOOPBACK, port))
        assert made.members["a"]._handle is None or made.members["a"]._handle.cancelled()

    run(scene)
