"""Stage nodes as real processes over real links, with workers that do not compute."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ppsmoke.cluster.addresses import Candidate
from ppsmoke.cluster.identity import RunAuthority
from ppsmoke.node_settings import mapped
from ppsmoke.stage_node import main
from tests.lab import hop_bench, stage_nodes, still_worker
from tests.lab.processes import is_alive, until


def expected(prompt: str, count: int) -> tuple[int, ...]:
    return tuple(still_worker.continuation(still_worker.encode(prompt, raw=True), count))


def test_two_stages_answer_over_real_links_twice_and_end_with_their_lifeline(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 2) as lab:
            await lab.gather()
            answers = []
            for request_id, prompt in enumerate(["Say hello, stages", "again"], start=1):
                await lab.request(prompt, request_id=request_id)
                answers.append(await lab.outcome())
            for stage in lab.stages:
                stage.process.stdin.close()
            began = time.monotonic()
            statuses = [await stage.wait() for stage in lab.stages]
            return answers, statuses, time.monotonic() - began, [stage.stderr for stage in lab.stages], lab.statuses

    answers, exit_statuses, seconds, stderr, statuses = asyncio.run(scenario())
    assert [answer.token_ids for answer in answers] == [expected("Say hello, stages", 5), expected("again", 5)]
    assert exit_statuses == [0, 0] and seconds < 5
    assert stderr == ["", ""]
    assert {status.stage for status in statuses if status.state == "ready"} == {0, 1}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_ends_a_node_with_its_worker(tmp_path, number):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, STILL_FAULT="child@1,hang@1") as lab:
            await lab.gather()
            await lab.request("hello")
            stage = lab.stages[0]
            await asyncio.to_thread(until, lambda: len(stage.pids) == 2, within_s=10)  # the worker is busy from now on
            os.kill(stage.process.pid, number)
            status = await stage.wait()
            return status, [is_alive(pid) for pid in stage.pids], len(stage.pids), stage.stderr

    status, alive, count, stderr = asyncio.run(scenario())
    assert status == 0 and count == 2 and not any(alive)
    assert stderr == ""


@pytest.mark.slow
def test_a_killed_worker_is_reported_with_its_stderr_and_its_node_ends_with_status_1(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 2, environments={1: {"STILL_FAULT": "die@3"}}) as lab:
            await lab.gather()
            await lab.request("Say hello", request_id=9)
            failed = await lab.outcome()
            status = await lab.stages[1].wait()
            return failed, status, lab.stages[1].stderr, lab.stages[0].process.poll()

    failed, status, stderr, other = asyncio.run(scenario())
    assert (failed.request_id, failed.stage, failed.phase) == (9, 1, "ask")
    assert failed.cause == "the worker was killed by signal 9 (SIGKILL)"
    assert failed.detail == "about to die, as asked"
    assert status == 1 and other is None
    assert "worker | about to die, as asked" in stderr
    assert "node | ask, stage 1: the worker was killed by signal 9 (SIGKILL)" in stderr


@pytest.mark.slow
def test_a_worker_that_cannot_load_is_reported_in_the_load_phase(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, STILL_FAULT="fail@load") as lab:
            await lab.gather()
            failed = await lab.outcome()
            lab.stages[0].process.stdin.close()
            return failed, await lab.stages[0].wait()

    failed, status = asyncio.run(scenario())
    assert (failed.request_id, failed.phase, failed.cause) == (0, "load", "the model is bad, as asked")
    assert failed.hint == "take another" and status == 1


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="a Python that can compute")
def test_a_python_too_old_to_compute_is_reported_through_the_link(tmp_path):
    check_lacking(tmp_path, "a computing stage needs Python 3.11, this is 3.10")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the tests' Python 3.11 has tinygrad")
def test_a_missing_tinygrad_is_reported_through_the_link(tmp_path):
    check_lacking(tmp_path, "a computing stage needs numpy, which is not installed")


def check_lacking(tmp_path, cause):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, PPSMOKE_NODE_WORKER="") as lab:
            await lab.gather()
            failed = await lab.outcome()
            lab.stages[0].process.stdin.close()
            return failed, await lab.stages[0].wait(), lab.stages[0].stderr

    failed, status, stderr = asyncio.run(scenario())
    assert (failed.phase, failed.cause, status) == ("load", cause, 1)
    assert failed.hint and cause in stderr and "Traceback" not in stderr


@pytest.mark.slow
def test_the_nodes_worker_ends_when_the_node_is_killed(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, STILL_FAULT="child@1,hang@1") as lab:
            await lab.gather()
            await lab.request("hello")
            stage = lab.stages[0]
            await asyncio.to_thread(until, lambda: len(stage.pids) == 2, within_s=10)
            stage.process.kill()
            await stage.wait()
            pids = stage.pids
            await asyncio.to_thread(until, lambda: not any(is_alive(pid) for pid in pids), within_s=10)
            return len(pids)

    assert asyncio.run(scenario()) == 2


@pytest.mark.slow
def test_a_node_whose_lifetime_has_passed_ends(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, PPSMOKE_NODE_LIFETIME_S="0.5") as lab:
            return await lab.stages[0].wait(), lab.stages[0].stderr

    status, stderr = asyncio.run(scenario())
    assert status == 1 and stderr == "node | its lifetime of 0.5 s has passed\n"


@pytest.mark.slow
def test_a_node_ends_with_its_orchestrator(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, PPSMOKE_NODE_LIFELINE="") as lab:
            await lab.gather()
            await lab.until("ready")
            await lab.leave()
            return await lab.stages[0].wait(), lab.stages[0].stderr

    assert asyncio.run(scenario()) == (0, "")


@pytest.mark.slow
def test_the_heartbeat_is_touched_while_there_is_a_link_to_the_orchestrator_and_not_before(tmp_path):
    heartbeat = tmp_path / "heartbeat"
    heartbeat.touch()
    os.utime(heartbeat, (1.0, 1.0))

    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, PPSMOKE_NODE_HEARTBEAT=str(heartbeat)) as lab:
            before = heartbeat.stat().st_mtime
            await lab.gather()
            await asyncio.to_thread(until, lambda: heartbeat.stat().st_mtime > 1.0, within_s=10)
            return before

    assert asyncio.run(scenario()) == 1.0


def test_a_container_advertises_the_public_address_and_ports_that_its_host_gave_it():
    told = {"PUBLIC_IPADDR": "198.51.100.7\n", "VAST_TCP_PORT_7070": "40123", "VAST_UDP_PORT_7071": "40124"}
    tcp, udp = ("0.0.0.0", 7070), ("0.0.0.0", 7071)
    assert mapped(told, tcp, udp) == (Candidate("mapped", "198.51.100.7", 40123, 40124),)
    assert mapped({**told, "VAST_UDP_PORT_7071": "x"}, tcp, udp) == (Candidate("mapped", "198.51.100.7", 40123, None),)
    for broken in ({}, {"PUBLIC_IPADDR": "198.51.100.7"}, {**told, "VAST_TCP_PORT_7070": "400123"}):
        assert mapped(broken, tcp, udp) == ()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("STAGE", "2", "STAGE is '2', not a number from 0 to 1"),
        ("NUM_STAGES", "", "NUM_STAGES is not set"),
        ("SEED_ADDR", "nobody", "SEED_ADDR is 'nobody'"),
        ("SEED_ADDR", "00112233445566ff@host", "SEED_ADDR: 'host' is not host:port"),
        ("MODEL", "", "MODEL is not set"),
        ("PPSMOKE_NODE_LEAF_KEY", "00ff", "PPSMOKE_NODE_LEAF_KEY is not 32 bytes in hex"),
        ("PPSMOKE_NODE_CLUSTER_KEY", "secret", "PPSMOKE_NODE_CLUSTER_KEY is not 32 bytes in hex"),
        ("PPSMOKE_NODE_CERTS", "/nowhere", "PPSMOKE_NODE_CERTS: /nowhere: No such file"),
        ("PPSMOKE_NODE_LIFETIME_S", "nan", "PPSMOKE_NODE_LIFETIME_S is 'nan', not a number of seconds"),
        ("PPSMOKE_NODE_LISTEN", "1,2,3", "PPSMOKE_NODE_LISTEN is '1,2,3'"),
        ("PPSMOKE_NODE_LIFELINE", "yes", "PPSMOKE_NODE_LIFELINE is 'yes', not stdin"),
        ("NUM_STAGES", "3", "a certificate for stage-0-of-2, while STAGE and NUM_STAGES say stage-0-of-3"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_line_with_the_variable(tmp_path, capsys, variable, value, words):
    identity = RunAuthority(bytes(32)).mint("stage-0-of-2")
    (tmp_path / "certs.json").write_text(
        json.dumps(
            {
                "ca": base64.b64encode(identity.ca_der).decode(),
                "leaf": base64.b64encode(identity.leaf_der).decode(),
            }
        )
    )
    environment = {
        "STAGE": "0",
        "NUM_STAGES": "2",
        "SEED_ADDR": "00112233445566ff",
        "MODEL": "smollm2:135m",
        "PPSMOKE_NODE_LEAF_KEY": identity.leaf_key.hex(),
        "PPSMOKE_NODE_CLUSTER_KEY": bytes(32).hex(),
        "PPSMOKE_NODE_CERTS": str(tmp_path / "certs.json"),
        variable: value,
    }
    assert main(environment) == 1
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert "PPSMOKE_NODE_LEAF_KEY" not in environment and "secret" not in err


def test_a_node_with_closed_standard_files_starts(tmp_path):
    script = 'exec 0<&- 2>&-; exec "$@"'
    found = subprocess.run(
        ["sh", "-c", script, "sh", *stage_nodes.COMMAND],
        cwd=stage_nodes.ROOT,
        env={"PATH": os.environ["PATH"], "STAGE": "x", "NUM_STAGES": "1"},
        stdout=subprocess.PIPE,
        timeout=20,
    )
    assert (found.returncode, found.stdout) == (1, b"")


@pytest.mark.slow
def test_a_node_dials_its_seed_at_the_second_address_when_the_first_is_deaf(tmp_path):
    async def scenario():
        async with stage_nodes.lab(tmp_path, 1, seed="@127.0.0.1:9,{own}") as lab:
            return await lab.until("ready")

    assert asyncio.run(scenario()).stage == 0


@pytest.mark.slow
def test_the_hop_benchmark_prints_every_part(capsys):
    asyncio.run(hop_bench.main(width=64, rounds=60, share=False))
    out = capsys.readouterr().out
    for part in ("codec", "JSON and base64", "bridge", "TLS link", "one hop", "a token of two stages"):
        assert f"\n{part}" in out
