"""Floods against a node at work: every request is answered meanwhile, an honest peer gets in, and little is kept."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from ppsmoke.cluster import counters as counters_module
from ppsmoke.cluster.frames import FrameFlags, FrameType, encode_frame
from ppsmoke.cluster.node import Node
from ppsmoke.cluster.sockets import MAX_HANDSHAKES, MAX_STRANGERS
from ppsmoke.waiting import Deadline, running
from tests.lab import stage_nodes, still_worker
from tests.lab.attacker import SOURCE
from tests.lab.cluster import WAIT_S, Lab, endpoint_of, lab, run, until, within
from tests.lab.honest import CLUSTER_KEY
from tests.lab.raw_peer import RawPeer

UDP = ("127.0.0.1", 0)
MAX_GROWTH_BYTES = 48 << 20  # of this process, in which the attacked node, its peers and the sampling live
REQUESTS = 20  # at least so many while the flood lasts


def resident_bytes(process: int | str = "self") -> int:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextmanager
def attacker(kind: str, node: Node, count: int) -> Iterator[subprocess.Popen[str]]:
    with flood(kind, node.udp_port if kind == "datagrams" else node.tcp_port, count, target=node.node_id) as process:
        yield process


@contextmanager
def flood(kind: str, port: int, count: int, *, target: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.lab.attacker", kind, str(port), "--count", str(count)]
    command += ["--key", CLUSTER_KEY.hex(), "--target", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


@dataclass
class Load:
    """Requests, one after the other, while something lasts; and what was seen of memory and sockets."""

    answered: int = 0
    grown_bytes: int = 0
    most_held: int = 0

    async def last(self, asker: Node, victim: Node, is_over) -> None:
        gc.collect()
        before = resident_bytes()
        while self.answered < REQUESTS or not is_over():
            request = b"request %d" % self.answered
            await within(asker.send(victim.address("ask"), request), "a request's way out")
            answer = await within(asker.mailbox("answers").receive(), "an answer in the flood")
            assert answer.payload == request
            self.answered += 1
            self.grown_bytes = max(self.grown_bytes, resident_bytes() - before)
            self.most_held = max(self.most_held, len(victim._listener))


async def answer_all(victim: Node, asker: Node) -> None:
    while True:
        request = await victim.mailbox("ask").receive()
        await victim.send(asker.address("answers"), request.payload)


async def at_work(cluster: Lab) -> tuple[Node, Node]:
    victim, asker = await cluster.node("stage-0-of-2"), await cluster.node("orchestrator")
    await within(asker.dial(endpoint_of(victim)))
    return victim, asker


FLOODS = [
    pytest.param("silent", 400, "door.evicted", id="silent"),
    pytest.param("half-open", 400, "door.handshake-evicted", id="half-open"),
    pytest.param("replay", 400, "door.replayed", id="replay"),
    pytest.param("datagrams", 20_000, "datagram.wrong-tag", id="datagrams"),
]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs all of 127.0.0.0/8, and /proc")
@pytest.mark.parametrize(("kind", "count", "counter"), FLOODS)
def test_a_flood_stops_no_request_keeps_nobody_out_and_little_of_it_stays(kind, count, counter, caplog, monkeypatch):
    monkeypatch.setattr(counters_module, "REPORT_EVERY_S", 0.2)

    async def scenario():
        async with lab(udp=UDP) as cluster:
            victim, asker = await at_work(cluster)
            load = Load()
            async with running(answer_all(victim, asker), name="answers"):
                await load.last(asker, victim, lambda: True)  # the control: before the flood
                assert victim.counters()[counter] == 0
                load = Load()
                with attacker(kind, victim, count) as process:
                    lasting = asyncio.ensure_future(load.last(asker, victim, lambda: process.poll() is not None))
                    await until(lambda: victim.counters()[counter] > 0, doing="the flood's first refusal")
                    honest = await cluster.node("stage-1-of-2")
                    await within(honest.dial(endpoint_of(victim)), "an honest dial in the flood")
                    await Deadline.after(2 * WAIT_S).wait(lasting, doing="the requests beside the flood")
            assert load.answered >= REQUESTS and load.grown_bytes < MAX_GROWTH_BYTES
            # One more of each is there for a turn of the loop, while it ends.
            assert load.most_held <= MAX_STRANGERS + MAX_HANDSHAKES + 4
            assert victim.counters()[counter] >= 50
            assert {link.role for link in victim.links()} == {"orchestrator", "stage-1-of-2"}
            await until(lambda: not len(victim._listener), doing="the last of the flood to be dropped")

    run(scenario())
    assert any(record.getMessage().startswith("refused: ") for record in caplog.records)


def test_a_backlog_that_is_full_leaves_the_loop_to_others_between_two_accepts():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            turns_at = []
            strangers = []
            try:
                for _ in range(60):  # all wait in the kernel: this loop has not had a turn
                    strangers.append(socket.create_connection(("127.0.0.1", node.tcp_port)))
                while node.counts["accepted"] < 60:
                    turns_at.append(node.counts["accepted"])
                    await asyncio.sleep(0)
            finally:
                for sock in strangers:
                    sock.close()
            steps = [later - earlier for earlier, later in zip(turns_at, turns_at[1:], strict=False)]
            assert max(steps) <= 2, "the loop had a turn after every accept"
            await until(lambda: not len(node._listener))

    run(scenario())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs all of 127.0.0.0/8, and /proc")
def test_a_flooded_stage_process_answers_every_request_rightly_and_says_that_it_is_flooded(tmp_path):
    """Two real stages around still workers; the first one's ports are under connections and datagrams at once."""

    async def scenario():
        async with stage_nodes.lab(tmp_path, 2) as stages:
            await stages.gather()
            first = stages.stages[0]
            where, pid = first.listening, first.process.pid
            before = resident_bytes(pid)
            answers: dict[str, tuple[int, ...]] = {}
            with (
                flood("silent", where["tcp_port"], 800, target=where["node_id"]) as connections,
                flood("datagrams", where["udp_port"], 10_000, target=where["node_id"]) as datagrams,
            ):
                while len(answers) < 5 or None in (connections.poll(), datagrams.poll()):
                    prompt = f"request {len(answers)}"
                    await stages.request(prompt, request_id=len(answers) + 1, max_tokens=3)
                    answers[prompt] = (await stages.outcome()).token_ids
            grown = resident_bytes(pid) - before
            await stages.leave()
            return answers, grown, await first.wait(), first.stderr

    answers, grown, exit_status, said = asyncio.run(scenario())
    for prompt, token_ids in answers.items():
        assert token_ids == tuple(still_worker.continuation(still_worker.encode(prompt, raw=True), 3))
    assert grown < MAX_GROWTH_BYTES and exit_status == 0
    assert "node | refused: " in said and "connections dropped because too many said nothing" in said


@pytest.mark.slow
def test_a_members_flood_of_junk_stops_no_request_and_little_of_it_stays():
    async def scenario():
        async with lab(udp=UDP) as cluster:
            victim, asker = await at_work(cluster)
            identity = cluster.authority.mint("stage-1-of-2")
            peer = await within(RawPeer.linked(victim, identity, CLUSTER_KEY))
            over = False

            async def flood() -> None:
                nonlocal over
                for number in range(20_000):
                    name = b"junk-%d" % (number % 5000)
                    payload = (1000).to_bytes(4, "big") + bytes([len(name)]) + name + bytes(1000)
                    flags = FrameFlags.FIRST | FrameFlags.LAST
                    peer.write(encode_frame(FrameType.DATA, flags=flags, sequence=number + 1, payload=payload))
                    if number % 50 == 0:
                        await peer.drained()
                over = True

            load = Load()
            async with running(answer_all(victim, asker), name="answers"), running(flood(), name="flood"):
                await load.last(asker, victim, lambda: over)
            await until(lambda: victim.counters()["link.junk-mailbox"] > 19_000)
            assert load.answered >= REQUESTS and load.grown_bytes < MAX_GROWTH_BYTES
            await peer.close()

    run(scenario())


def test_whoever_floods_from_one_address_takes_the_places_of_its_own():
    async def scenario():
        async with lab() as cluster:
            node = await cluster.node("orchestrator")
            slow = socket.create_connection(("127.0.0.1", node.tcp_port))  # honest, and slow to say who it is
            await until(lambda: node.counts["accepted"] == 1)
            flood = []
            try:
                for number in range(2 * MAX_STRANGERS):
                    flood.append(socket.create_connection(("127.0.0.1", node.tcp_port), source_address=(SOURCE, 0)))
                    await until(lambda number=number: node.counts["accepted"] == number + 2)
                assert node.counters()["door.evicted"] == MAX_STRANGERS + 1
                slow.setblocking(False)
                with pytest.raises(BlockingIOError):
                    slow.recv(1)  # the control: it is still waited for
                await until(lambda: len(node._listener) == MAX_STRANGERS)
            finally:
                for sock in (slow, *flood):
                    sock.close()
            await until(lambda: not len(node._listener))

    if not sys.platform.startswith("linux"):
        pytest.skip("needs all of 127.0.0.0/8")
    run(scenario())
