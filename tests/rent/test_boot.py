"""A container from its start command to its end: real processes, a real socket, the push as the run does it."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time

import pytest

from ppsmoke.rent.boot import start_command
from ppsmoke.rent.push import BootFailed, build_payload
from tests.lab.small_container import Api, Container, container, until
from tests.rent.boot_lab import CODE, PAYLOAD, end_node, listens, push_to, status_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a rented container is Linux")

TAKEN = (200, '{"success": true}')
GONE = (404, '{"error": "no_such_instance"}')


def test_the_code_arrives_while_pip_runs_then_the_node_runs_beside_the_dead_man(tmp_path):
    seen = []
    with container(tmp_path, FAKE_PIP_S="0.4") as it:
        report = push_to(it, seen=seen)
        node = it.node()
        dead_man = it.dead_man()
        assert report.confirmed and report.payload_bytes == len(PAYLOAD) and report.status.warning == ""
        assert report.sha256 == hashlib.sha256(PAYLOAD).hexdigest()
        assert [status.state for status in seen][0] == "accepted" and seen[-1].state == "starting"
        assert "Collecting tinygrad" in "".join(status.tail for status in seen)
        assert report.status.python == sys.version.split()[0] and report.status.pip_s >= 0.4
        assert node["parent"] == it.process.pid and it.process.poll() is None
        assert os.stat(f"/proc/{dead_man}").st_uid == os.getuid()
        assert json.loads(node["certificates"]) == {"ca": "Q0E=", "leaf": "TEVBRg=="}
        assert node["environ"]["PPSMOKE_NODE_HEARTBEAT"] == str(it.home / "heartbeat")
        assert 290 <= float(node["environ"]["PPSMOKE_NODE_LIFETIME_S"]) <= 300
        assert not {"PPSMOKE_NODE_SECRET", "CONTAINER_API_KEY"} & node["environ"].keys()
        assert node["environ"]["PPSMOKE_NODE_LEAF_KEY"] and node["file"].startswith(str(it.home))
        (call,) = it.pip_calls()
        assert call["argv"][:1] == ["install"] and call["argv"][-2:] == ["tinygrad==0.12.0", "numpy"]
        assert not [name for name in call["environ"] if "PPSMOKE" in name or "KEY" in name]
        assert (it.home / "heartbeat").exists()  # the push was contact


@pytest.mark.slow
def test_the_nodes_end_is_told_and_the_same_push_starts_it_again(tmp_path):
    with container(tmp_path) as it:
        push_to(it)
        first = it.node()
        end_node(it, 3)
        it.says("the node ended with status 3")
        until(lambda: listens(it), "the port to be the boot's again")
        status = status_of(it)
        assert (status.state, status.exit) == ("ended", 3) and status.last_line == "node: my last words"
        assert "I am up?[2J" in status.tail  # an escape sequence of the other side's never reaches our terminal
        push_to(it)
        assert it.node()["pid"] != first["pid"]


@pytest.mark.slow
def test_a_killed_node_leaves_the_dead_man_alive_and_at_work(tmp_path):
    with Api(GONE) as api, container(tmp_path, VAST_URL=api.url, PPSMOKE_NODE_SILENCE_S="3") as it:
        push_to(it)
        node, dead_man = it.node(), it.dead_man()
        os.kill(node["pid"], signal.SIGKILL)
        it.says("the node ended with status -9")
        assert it.dead_man() == dead_man
        assert it.process.wait(20) == 0  # the API said gone
        it.all_gone()
        assert len(api.calls) == 1
        assert "orchestrator silent: DELETE" in it.text()


@pytest.mark.slow
def test_a_hung_node_cannot_hold_the_dead_man_up(tmp_path):
    with Api(GONE) as api, container(tmp_path, VAST_URL=api.url, PPSMOKE_NODE_LIFETIME_S="2") as it:
        push_to(it)
        os.kill(it.node()["pid"], signal.SIGSTOP)
        assert it.process.wait(20) == 0
        it.all_gone()
        assert "lifetime over: DELETE" in it.text()


@pytest.mark.slow
def test_a_node_that_hears_the_orchestrator_keeps_the_machine(tmp_path):
    (tmp_path / "heart-beats").touch()
    with Api(GONE) as api, container(tmp_path, VAST_URL=api.url, PPSMOKE_NODE_SILENCE_S="3") as it:
        push_to(it)
        it.node()
        time.sleep(4)
        assert api.calls == []
        (tmp_path / "heart-beats").unlink()
        assert it.process.wait(20) == 0


@pytest.mark.slow
def test_nobody_ever_came_and_the_lifetime_ends_the_machine_while_pip_hangs(tmp_path):
    with Api(TAKEN, GONE) as api:
        with container(tmp_path, VAST_URL=api.url, PPSMOKE_NODE_LIFETIME_S="0.5", FAKE_PIP_S="99") as it:
            assert it.process.wait(20) == 0
            it.all_gone()
            assert len(api.calls) == 2


@pytest.mark.slow
def test_a_killed_dead_man_is_noticed_replaced_and_told_and_its_lifetime_is_not_renewed(tmp_path):
    with container(tmp_path) as it:
        it.says("armed:")
        first = it.dead_man()
        kept = (it.home / "lifetime").read_text()
        os.kill(first, signal.SIGKILL)
        it.says("the dead-man was ended")
        it.says("armed:", times=2)
        assert it.dead_man() != first and (it.home / "lifetime").read_text() == kept
        report = push_to(it)
        assert report.status.dead_man_restarts == 1 and "ended 1 times" in report.status.warning


def test_a_container_without_its_key_says_so_in_its_log_and_to_us(tmp_path):
    with container(tmp_path, CONTAINER_API_KEY="") as it:
        report = push_to(it)
        assert report.status.warning == (
            "the machine cannot end itself (no key in the container): only this program and its reaper will"
        )
        it.says("ppsmoke dead-man: no CONTAINER_API_KEY or CONTAINER_ID: this machine cannot end itself")
        it.node()


@pytest.mark.slow
def test_a_container_that_starts_again_after_its_lifetime_ends_at_once(tmp_path):
    with Api(GONE) as api, container(tmp_path, VAST_URL=api.url) as it:
        it.says("armed")
        it.end()
        (it.home / "lifetime").write_text("1.0\n1.0\n")
        it.start()
        assert it.process.wait(20) == 0 and len(api.calls) == 1


def test_sigterm_ends_everything(tmp_path):
    with container(tmp_path) as it:
        push_to(it)
        it.node()
        it.process.terminate()
        it.process.wait(20)
        it.all_gone()


@pytest.mark.slow
def test_pip_that_fails_three_times_is_the_pushs_error_with_its_words(tmp_path):
    with container(tmp_path, FAKE_PIP="fails") as it:
        with pytest.raises(BootFailed) as failed:
            push_to(it)
        assert str(failed.value) == (
            "boot, stage 1: pip failed 3 times: ERROR: No matching distribution found for tinygrad==0.12.0"
        )
        assert failed.value.kind == "pip" and "Collecting tinygrad" in failed.value.detail
        assert len(it.pip_calls()) == 3 and it.dead_man() and it.process.poll() is None
        with pytest.raises(BootFailed, match="pip failed 3 times"):  # and whoever comes later is told the same
            push_to(it)


@pytest.mark.slow
def test_a_full_disk_is_told_and_does_not_end_the_boot(tmp_path):
    with container(tmp_path) as it:
        it.says("listening")
        (it.home / "certificates.json").mkdir()
        with pytest.raises(BootFailed, match="IsADirectoryError"):
            push_to(it)
        (it.home / "certificates.json").rmdir()
        push_to(it)
        it.node()


def test_a_baked_image_needs_certificates_alone_and_installs_nothing(tmp_path):
    it = Container(tmp_path)
    image = tmp_path / "image.pyz"
    image.write_bytes(CODE)
    try:
        it.start([sys.executable, str(image), "baked"])
        report = push_to(it, build_payload('{"ca": ""}', b""))
        node = it.node()
        assert report.confirmed and node["file"] == str(image) and node["certificates"] == '{"ca": ""}'
        assert node["parent"] == it.process.pid and it.pip_calls() == [] and it.dead_man()
    finally:
        it.end()


def unshared(it: Container) -> list[str]:
    """The start command in a process namespace of its own, so that it really is process 1."""
    command = start_command()
    return [shutil.which("unshare"), "-p", "-f", "--kill-child", "--mount-proc", command.onstart, *command.args]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="a process namespace needs root")
def test_as_process_1_it_reaps_what_others_leave_behind_and_its_end_is_the_containers(tmp_path):
    (tmp_path / "orphans").touch()
    it = Container(tmp_path)
    try:
        it.start(unshared(it))
        push_to(it)
        assert it.node()["parent"] == 1
        boot = until(lambda: [pid for pid in it.processes() if parent_of(pid) == it.process.pid], "process 1")[0]
        until(lambda: [pid for pid in children_of(boot) if name_of(pid) == "sleep"], "an orphan below process 1")
        until(lambda: not [pid for pid in children_of(boot) if name_of(pid) == "sleep"], "the orphan to be reaped")
        os.kill(boot, signal.SIGKILL)
        it.process.wait(20)
        it.all_gone()
    finally:
        it.end()


def stat_of(pid: int) -> tuple[str, list[str]]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().rpartition(") ")
    except OSError:
        return "", ["", "0"]
    return name.partition("(")[2], rest.split()


def name_of(pid: int) -> str:
    return stat_of(pid)[0]


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1][1])


def children_of(pid: int) -> list[int]:
    """Zombies included."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and parent_of(int(entry)) == pid]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tinygrad") is None, reason="pip would have to bring tinygrad")
def test_with_the_real_pip_where_everything_is_there_already(tmp_path):
    it = Container(tmp_path, PIP_NO_INDEX="1")
    del it.environment["PYTHONPATH"]
    it.environment["PATH"] = os.path.dirname(sys.executable)
    try:
        it.start()
        report = push_to(it, within_s=120)
        assert "Requirement already satisfied: tinygrad==0.12.0" in report.status.tail
        it.node()
    finally:
        it.end()
