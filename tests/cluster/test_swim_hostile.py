"""A member that lies, with valid seals: it may cost availability, never a crash, a flood, or memory without bound."""

from __future__ import annotations

import random

import pytest

from ppsmoke.cluster.names import MAX_ENTRIES, NameEntry
from ppsmoke.cluster.swim import MAX_PATHS
from ppsmoke.cluster.swim_packets import (
    Ack,
    ForwardedAck,
    Gossip,
    MemberUpdate,
    Nack,
    Packet,
    Ping,
    PingRequest,
    Stale,
    Sync,
    encode,
)
from ppsmoke.cluster.swim_state import SECOND, Config, Send, State
from tests.lab.lone_core import EPOCH, ME, LoneCore, peer_id

U32, U64 = 2**32 - 1, 2**64 - 1
LIMIT = Config().payload_limit


class Liar:
    """Writes any packet that decodes, preferring the edges of every field."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def packet(self) -> bytes:
        r = self._random
        body = r.choice(
            [
                Ping(self.u32(), self.u32(), r.randbytes(8)),
                Ack(self.u32(), r.randbytes(8)),
                PingRequest(self.u32(), self.someone(), r.choice((0, 1, 300, 65535))),
                Nack(self.u32()),
                ForwardedAck(self.u32(), self.someone()),
                Gossip(),
                Sync(self.u32(), r.random() < 0.5),
                Stale(self.u64(), self.u64()),
            ]
        )
        updates = [self.member() if r.random() < 0.6 else self.name() for _ in range(r.randrange(12))]
        return encode(Packet(self.u32(), r.random() < 0.5, body, updates))

    def sender(self) -> str:
        return self.someone(but_me=True)

    def someone(self, *, but_me: bool = False) -> str:
        r = self._random
        ids = [peer_id("a"), peer_id("b"), f"{r.randrange(5000):016x}", "0" * 16, "f" * 16]
        return r.choice(ids if but_me else [*ids, ME])

    def u32(self) -> int:
        return self._random.choice((0, 1, 2, U32 - 1, U32, self._random.randrange(U32)))

    def u64(self) -> int:
        return self._random.choice((0, EPOCH - 1, EPOCH, EPOCH, EPOCH + 1, EPOCH + 10**9, U64 - 1, U64))

    def member(self) -> MemberUpdate:
        accuser = self._random.choice(("", self.someone()))
        meta = bytes(self._random.choice((0, 1, 512)))
        return MemberUpdate(State(self._random.randrange(4)), self.someone(), self.u64(), self.u32(), accuser, meta)

    def name(self) -> NameEntry:
        name = self._random.choice(("pp-entry", "n" * 64, f"n{self._random.randrange(3000)}"))
        deleted = self._random.random() < 0.2
        return NameEntry(name, self.someone(), self.u64(), self.u32(), self.u32(), bytes(128), deleted)


def lie(seed: int, packets: int) -> LoneCore:
    lone, liar, generator = LoneCore("ab"), Liar(seed), random.Random(seed)
    lone.perform(lone.core.register(0, "pp-entry", b"mine"))
    for _ in range(packets):
        via = generator.choice(("udp", "link"))
        epoch = generator.choice((EPOCH, EPOCH, liar.u64()))
        commands = lone.core.on_datagram(lone.now, liar.sender(), epoch, liar.packet(), via=via)
        sent = [command for command in commands if isinstance(command, Send)]
        assert all(len(send.payload) <= LIMIT and send.to != ME for send in sent)
        lone.perform(commands)
        lone.pass_time((lone.now + generator.randrange(SECOND // 5)) / SECOND)
        lone.sent.clear()
        lone.events.clear()
    return lone


def is_sane(lone: LoneCore) -> None:
    core = lone.core
    assert len(core.table.members) <= core.config.max_members and ME not in core.table.members
    assert len(core.names) <= MAX_ENTRIES and len(core._paths) <= MAX_PATHS
    assert 0 <= core.incarnation <= U32 and EPOCH <= core.epoch < U64
    mine = core.names.get("pp-entry", ME)
    assert mine is not None and mine.value == b"mine" and mine.owner_epoch == core.epoch, "nobody took our name"
    assert len(lone.timers) < 5000


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_brings_nobody_down(seed):
    is_sane(lie(seed, 400))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 11))
def test_a_liar_brings_nobody_down_for_long(seed):
    is_sane(lie(seed, 3_000))


def test_a_flood_of_unasked_packets_is_not_answered_by_a_flood():
    lone = LoneCore("ab")
    lone.sent.clear()
    for seq in range(1000):
        lone.hear("a", Sync(seq, True))
        lone.hear("b", Gossip(), incarnation=0)
        lone.hear("z", Nack(seq))
    assert len(lone.sent) < 10
