"""The bridge with real worker processes: answers, every way to die, and nothing left behind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ppsmoke.errors import StageError, WorkerLost, WorkerRefused
from ppsmoke.pipeline import bridge as bridge_module
from ppsmoke.pipeline.bridge import CLOSE_GRACE_S, Bridge
from tests.lab import still_worker
from tests.lab.processes import group_is_empty, is_alive, until

ROOT = Path(__file__).parents[2]
TOKENIZE = {"request_id": 7, "prompt": "hé", "raw": True}


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "STAGE": "0", "NUM_STAGES": "1", **more}


@asynccontextmanager
async def bridge_to(target: str = still_worker.TARGET, **more: str):
    bridge = await Bridge.start(environment(**more), stage=1, on_progress=lambda line: None, target=target)
    try:
        yield bridge
    finally:
        await bridge.close()
        assert group_is_empty(bridge.pid)


async def tokenize(bridge: Bridge, deadline_s: float = 10.0, **more):
    return await bridge.call("tokenize", deadline_s=deadline_s, **{**TOKENIZE, **more})


def test_calls_are_answered_progress_is_heard_and_close_leaves_nothing(capfd):
    async def scenario():
        heard = []
        bridge = await Bridge.start(environment(), stage=0, on_progress=heard.append, target=still_worker.TARGET)
        ready = await bridge.ready
        assert (ready["pid"], ready["chunk"]) == (bridge.pid, 8)
        assert heard == [{"status": "loading", "what": "nothing", "done": 1, "total": 2}]
        assert (await tokenize(bridge))["tokens"] == still_worker.encode("hé", raw=True)
        with pytest.raises(WorkerRefused) as refused:
            await bridge.call("dance", deadline_s=10.0, request_id=8)
        assert (refused.value.kind, refused.value.stage) == ("op", 0)
        assert "no such op: dance" in str(refused.value)
        both = await asyncio.gather(tokenize(bridge, prompt="a"), tokenize(bridge, prompt="b", request_id=9))
        assert [reply["request_id"] for reply in both] == [7, 9]
        began = time.monotonic()
        await bridge.close()
        await bridge.close()
        assert time.monotonic() - began < CLOSE_GRACE_S, "it left by itself"
        assert group_is_empty(bridge.pid)
        with pytest.raises(WorkerLost, match="ended by its node"):
            await tokenize(bridge)

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_worker_is_known_at_once_with_the_end_of_its_stderr(capfd):
    async def scenario():
        async with bridge_to(STILL_FAULT="die@2,child@1") as bridge:
            await tokenize(bridge)
            began = time.monotonic()
            with pytest.raises(WorkerLost) as lost:
                await tokenize(bridge)
            assert time.monotonic() - began < 5.0, "long before the call's own deadline"
            assert (await bridge.lost) is lost.value
            return lost.value

    lost = asyncio.run(scenario())
    assert lost.cause == "the worker was killed by signal 9 (SIGKILL)"
    assert (lost.phase, lost.stage) == ("ask", 1) and "memory" in lost.hint
    assert lost.detail == "about to die, as asked"
    assert "worker | about to die, as asked" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "cause", "detail"),
    [
        ("hang@1", "tokenize was not answered within 0.2 s", ""),
        ("garbage@1", "wrote something that is no reply: b'\\xff\\x00 this is no JSON'", ""),
        ("wrongid@1", "answered request 999 when it was asked for 7", ""),
        ("exit@1", "the worker exited with status 1", "ValueError: an uncaught error, as asked"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_ended_and_the_cause_is_named(fault, cause, detail):
    async def scenario():
        async with bridge_to(STILL_FAULT=fault) as bridge:
            await bridge.ready
            with pytest.raises((WorkerLost, WorkerRefused)):
                await tokenize(bridge, deadline_s=0.2)
            return await bridge.lost

    lost = asyncio.run(scenario())
    assert lost.cause == cause and detail in lost.detail


@pytest.mark.parametrize(
    ("fault", "kind", "cause"),
    [
        ("fail@load", StageError, "the model is bad, as asked"),
        ("die@load", WorkerLost, "the worker was killed by signal 9 (SIGKILL)"),
        ("garbage@load", WorkerLost, "wrote something that is no reply"),
    ],
)
def test_a_worker_that_does_not_load_says_why(fault, kind, cause):
    async def scenario():
        async with bridge_to(STILL_FAULT=fault) as bridge:
            with pytest.raises(kind) as failed:
                await bridge.ready
            return failed.value

    failed = asyncio.run(scenario())
    assert failed.cause.startswith(cause)
    assert (failed.phase, failed.stage) == ("load", 1)
    assert fault != "fail@load" or failed.hint == "take another"


def test_a_worker_that_cannot_be_imported_says_so():
    async def scenario():
        async with bridge_to("tests.lab.no_such_module:serve") as bridge:
            with pytest.raises(StageError) as failed:
                await bridge.ready
            return failed.value, await bridge.lost

    failed, lost = asyncio.run(scenario())
    assert "No module named 'tests.lab.no_such_module'" in failed.cause
    assert "Traceback" in lost.detail


def test_stray_prints_and_a_flood_on_stderr_harm_nothing(capfd):
    async def scenario():
        async with bridge_to(STILL_FAULT="print@1,flood@2,print@3") as bridge:
            for _ in range(4):
                assert (await tokenize(bridge))["tokens"]
            return bridge.stderr_tail()

    tail = asyncio.run(scenario())
    err = capfd.readouterr().err
    assert err.count("worker | a stray print\n") == err.count("worker | a stray echo\n") == 2
    assert err.count("worker | a stray write to fd 1\n") == 2
    assert err.count("of a flood") == 20_000
    assert len(tail) <= 16 << 10


@pytest.mark.slow
def test_five_megabytes_come_back_in_one_line():
    async def scenario():
        async with bridge_to() as bridge:
            assert len((await tokenize(bridge, prompt="x" * 1_000_000))["tokens"]) == 1_000_000

    asyncio.run(scenario())


def test_too_long_a_line_ends_the_worker_and_is_never_held_whole(monkeypatch):
    monkeypatch.setattr(bridge_module, "MAX_LINE_BYTES", 1 << 20)

    async def scenario():
        async with bridge_to() as bridge:
            with pytest.raises(WorkerLost, match="wrote a line of more than 1 MiB"):
                await tokenize(bridge, prompt="x" * 400_000)

    asyncio.run(scenario())


def test_a_call_that_was_cancelled_leaves_the_later_ones_in_step():
    async def scenario():
        async with bridge_to(STILL_SLOW_S="0.05") as bridge:
            await bridge.ready
            dropped = asyncio.ensure_future(tokenize(bridge, prompt="dropped", request_id=1))
            await asyncio.sleep(0)
            dropped.cancel()
            assert (await tokenize(bridge, prompt="kept", request_id=2))["tokens"] == still_worker.encode(
                "kept", raw=True
            )

    asyncio.run(scenario())


def start_host(command: list[str], **more: str) -> tuple[subprocess.Popen, dict[str, int]]:
    """A process that holds a bridge, in a session of its own, and the pids."""
    host = subprocess.Popen(
        command,
        cwd=more.pop("cwd", str(ROOT)),
        env=environment(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return host, json.loads(host.stdout.readline())


def ask_host(host: subprocess.Popen, **request) -> dict:
    host.stdin.write(json.dumps({"op": "tokenize", **TOKENIZE, **request}) + "\n")
    host.stdin.flush()
    return json.loads(host.stdout.readline())


def end_host(host: subprocess.Popen) -> str:
    """Its stderr; the host leaves at the end of its input."""
    _, err = host.communicate(timeout=10)
    return err


@pytest.mark.slow
def test_a_busy_worker_and_its_children_end_when_the_node_is_killed(tmp_path):
    pids = tmp_path / "pids"
    host, seen = start_host(
        [sys.executable, "-m", "tests.lab.bridge_host"], STILL_PIDS=str(pids), STILL_FAULT="child@1,hang@1"
    )
    host.stdout.readline()  # ready
    host.stdin.write(json.dumps({"op": "tokenize", **TOKENIZE}) + "\n")
    host.stdin.flush()
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2, within_s=10)
    worker, child = map(int, pids.read_text().split())
    assert worker == seen["worker"] and is_alive(worker) and is_alive(child)
    host.kill()
    assert until(lambda: not is_alive(worker) and not is_alive(child), within_s=5) < 3.5
    host.communicate(timeout=10)


def test_an_idle_worker_and_its_children_end_when_the_node_is_killed(tmp_path):
    pids = tmp_path / "pids"
    host, _ = start_host(
        [sys.executable, "-m", "tests.lab.bridge_host"], STILL_PIDS=str(pids), STILL_FAULT="child@load"
    )
    host.stdout.readline()  # ready
    host.kill()
    until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), within_s=3)
    host.communicate(timeout=10)


@pytest.mark.slow
def test_a_terminals_interrupt_does_not_reach_the_worker_not_even_while_it_starts():
    host, seen = start_host([sys.executable, "-m", "tests.lab.bridge_host"])
    os.killpg(host.pid, signal.SIGINT)  # within the worker's first 100 ms
    assert sorted(json.dumps(json.loads(host.stdout.readline())) for _ in range(2))[0] == '"SIGINT"'
    os.killpg(host.pid, signal.SIGINT)
    assert json.loads(host.stdout.readline()) == "SIGINT"
    assert ask_host(host)["tokens"]
    assert "Traceback" not in end_host(host)
    assert host.returncode == 0 and not is_alive(seen["worker"])


@pytest.mark.slow
def test_a_worker_starts_from_a_zipapp_in_another_folder(tmp_path):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in [*ROOT.glob("ppsmoke/**/*.py"), ROOT / "tests/__init__.py", *ROOT.glob("tests/lab/*.py")]:
            zipped.write(path, path.relative_to(ROOT).as_posix())
        zipped.writestr(
            "__main__.py", "from tests.lab.bridge_host import main\nif __name__ == '__main__':\n    main()\n"
        )
    (tmp_path / "lab.pyz").write_bytes(archive.getvalue())
    (tmp_path / "elsewhere").mkdir()
    host, seen = start_host([sys.executable, "../lab.pyz"], cwd=str(tmp_path / "elsewhere"))
    assert json.loads(host.stdout.readline())["status"] == "ready"
    assert ask_host(host)["tokens"]
    assert end_host(host) == ""
    assert host.returncode == 0 and not is_alive(seen["worker"])
