"""An instance of the fake really runs its start command: processes, ports, peers, pip, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.lab.fake_vast import FakeVast, Inside
from tests.lab.fake_vast.containers import way_in
from tests.lab.fake_vast.gate import descendants
from tests.lab.raw_vast import call, rent, show

ROOT = Path(__file__).parents[2]
NAMESPACES = way_in("best") is not None
ISOLATIONS = [
    pytest.param("namespace", marks=pytest.mark.skipif(not NAMESPACES, reason="neither root nor user namespaces")),
    "plain",
]

# Answers on 7070/tcp and 7071/udp. "who" tells who asked; "dial HOST TCP UDP" asks a peer; "end" destroys itself.
SERVICE = r"""
import json, os, socket, threading, urllib.request
listen = os.environ.get("PPSMOKE_NODE_LISTEN", "0.0.0.0:7070,0.0.0.0:7071").split(",")
tcp_at, udp_at = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in listen)]
tcp, udp = socket.create_server(tcp_at), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(udp_at)
me = os.environ["CONTAINER_ID"]
def echo():
    while True:
        data, sender = udp.recvfrom(2048)
        udp.sendto(json.dumps([me, sender[0]]).encode(), sender)
threading.Thread(target=echo, daemon=True).start()
print("listening, pid", os.getpid(), flush=True)
def answer(words, caller):
    if words[0] == "dial":
        with socket.create_connection((words[1], int(words[2])), 5) as peer:
            peer.sendall(b"who")
            by_tcp = json.loads(peer.recv(2048))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.settimeout(5)
            peer.sendto(b"who", (words[1], int(words[3])))
            return [by_tcp, json.loads(peer.recv(2048))]
    if words[0] == "end":
        url = os.environ["VAST_URL"] + "/api/v0/instances/" + me + "/"
        request = urllib.request.Request(url, method="DELETE")
        request.add_header("Authorization", "Bearer " + os.environ["CONTAINER_API_KEY"])
        return json.load(urllib.request.urlopen(request, timeout=5))
    return [me, caller[0]]
def serve(connection, caller):
    with connection:
        try:
            connection.sendall(json.dumps(answer(connection.recv(2048).decode().split(), caller)).encode())
        except OSError as error:
            connection.sendall(json.dumps(str(error)).encode())
while True:
    threading.Thread(target=serve, args=tcp.accept()).start()
"""


def eventually(check: Callable[[], Any], *, within_s: float = 20.0) -> Any:
    """What check answers once it is true; fails when it never is."""
    end = time.monotonic() + within_s
    while not (value := check()):
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.02)
    return value


def serve(fake: FakeVast, index: int = 0) -> tuple[int, str, int, int]:
    """(id, address, TCP port, UDP port) of an instance that answers."""
    env = {"-p 7070:7070": "1", "-p 7071:7071/udp": "1", "VAST_URL": fake.url}
    made = rent(fake, index, onstart="python3", args=["-c", SERVICE], env=env)
    fake.clock.advance(60)
    eventually(lambda: "listening" in fake.log(made))
    ports = show(fake, made)["ports"]
    tcp, udp = (int(ports[name][0]["HostPort"]) for name in ("7070/tcp", "7071/udp"))
    return made, show(fake, made)["public_ipaddr"].strip(), tcp, udp


def ask(host: str, port: int, words: str) -> Any:
    with socket.create_connection((host, port), 10) as connection:
        connection.settimeout(10)
        connection.sendall(words.encode())
        return json.loads(connection.recv(4096))


def ask_udp(host: str, port: int, *, within_s: float = 5.0) -> Any:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.bind(("127.0.0.1", 0))
        asking.settimeout(within_s)
        asking.sendto(b"who", (host, port))
        return json.loads(asking.recv(2048))


def refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # it was just being closed
    return False


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_mapped_ports_lead_to_the_service_and_peers_meet_at_the_public_address(isolation, tmp_path):
    with FakeVast(inside=Inside(isolation=isolation), folder=tmp_path) as fake:
        assert fake.isolation == isolation
        (one, *at_one), (two, *at_two) = serve(fake, 0), serve(fake, 4)
        assert ask(*at_one[:2], "who") == [str(one), "127.0.0.1"]
        assert ask_udp(at_two[0], at_two[2]) == [str(two), "127.0.0.1"]
        caller = at_one[0] if isolation == "namespace" else "127.0.0.1"
        assert ask(*at_one[:2], "dial {} {} {}".format(*at_two)) == [[str(two), caller]] * 2
        assert ask(*at_one[:2], "dial {} {} {}".format(*at_one))[0][0] == str(one)  # its own public address, too
        with suppress(ValueError):  # it may be gone before it has answered
            ask(*at_two[:2], "end")
        eventually(lambda: refuses(*at_two[:2]))
        assert [line["id"] for line in fake.ledger()["live"]] == [one]
        assert ask(*at_one[:2], "who")[0] == str(one)


def test_the_start_command_finds_the_documented_environment_and_its_own_folders(tmp_path):
    with FakeVast(inside=Inside(env={"ACCOUNT": "yes"}), folder=tmp_path) as fake:
        made = rent(fake, args=["-c", "env; exit 3"])
        fake.clock.advance(60)
        eventually(lambda: show(fake, made)["actual_status"] == "exited")
        assert "status 3" in show(fake, made)["status_msg"]
        path = f"/api/v0/instances/request_logs/{made}/"
        url = call(fake, "PUT", path, {}).json["result_url"]
        text = [call(fake, "GET", url, key=None).body for _ in range(3)][-1].decode()
        instance = fake.instance(made)
    env = dict(line.split("=", 1) for line in text.splitlines())
    assert (env["CONTAINER_ID"], env["CONTAINER_API_KEY"]) == (str(made), instance.api_key)
    assert (env["VAST_CONTAINERLABEL"], env["PUBLIC_IPADDR"]) == (f"C.{made}", instance.address)
    assert env["VAST_TCP_PORT_7070"] == str(instance.ports["7070/tcp"])
    assert env["VAST_UDP_PORT_7071"] == str(instance.ports["7071/udp"])
    assert (env["STAGE"], env["ACCOUNT"]) == ("0", "yes")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR"):
        assert env[name].startswith(str(tmp_path / str(made)))
    assert not {"VAST_API_KEY", "VIRTUAL_ENV", "PYTHONPATH"} & set(env)


STRAYS = "setsid sh -c 'setsid sleep 1000 & sleep 1000' & setsid sleep 1000 & echo up; {}"


def alive(pids: list[int]) -> list[int]:
    """Those of them that are there and no zombies; one may go between two looks at it."""
    found = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("how", ["destroyed", "stopped", "start command over"])
def test_every_process_of_a_container_ends_with_it_strays_too(isolation, how, tmp_path):
    with FakeVast(inside=Inside(isolation=isolation), folder=tmp_path) as fake:
        last = f"while [ ! -e {tmp_path}/over ]; do sleep 0.05; done" if how == "start command over" else "sleep 1000"
        made = rent(fake, args=["-c", STRAYS.format(last)])
        fake.clock.advance(60)
        eventually(lambda: "up" in fake.log(made) and len(fake.pids(made)) >= 5)
        pids = fake.pids(made)
        if how == "destroyed":
            call(fake, "DELETE", f"/api/v0/instances/{made}/", {})
        elif how == "stopped":
            call(fake, "PUT", f"/api/v0/instances/{made}/", {"state": "stopped"})
        else:
            (tmp_path / "over").touch()
        eventually(lambda: not alive(pids))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_by_hand_everything_that_the_fake_started_ends_when_it_ends(isolation, how, tmp_path):
    argv = [sys.executable, "-m", "tests.lab.fake_vast", "--key", "K", "--time-scale", "50", "--isolation", isolation]
    fake = subprocess.Popen([*argv, "--folder", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = fake.stdout.readline().strip()
        offers = _json(url, "POST", "/api/v0/bundles/", {"gpu_name": {"eq": "L4"}})["offers"]
        body = {"image": "python:3.12-slim", "disk": 10, "env": {}, "runtype": "args", "onstart": "/bin/sh"}
        body["args"] = ["-c", STRAYS.format("sleep 1000")]
        _json(url, "PUT", f"/api/v0/asks/{offers[0]['id']}/", body)
        pids = eventually(lambda: len(found := descendants(fake.pid)) >= 6 and found)
        assert len(_json(url, "GET", "/_lab/ledger")["live"]) == 1
    finally:
        fake.send_signal(how)
    status = fake.wait(20)
    fake.stdout.close()
    assert status == (0 if how == signal.SIGTERM else -signal.SIGKILL)
    eventually(lambda: not alive(pids))


def _json(url: str, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        url + path, method=method, data=None if body is None else json.dumps(body).encode()
    )
    request.add_header("Authorization", "Bearer K")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as reply:
        return json.load(reply)


@pytest.mark.slow
def test_by_hand_faults_can_be_listed_and_a_wrong_one_is_refused():
    argv = [sys.executable, "-m", "tests.lab.fake_vast"]
    listing = subprocess.run([*argv, "--list-faults"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    names = {line.split()[0] for line in listing.stdout.splitlines()}
    assert {"create.race-404", "destroy.429", "machine.cdi", "any.reset-after"} <= names
    wrong = subprocess.run([*argv, "--fault", "no.such:2"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (wrong.returncode, "no.such" in wrong.stderr) == (2, True)


@pytest.mark.slow
def test_running_but_refusing_is_refused_and_filtered_datagrams_are_lost(tmp_path):
    with FakeVast(inside=Inside(), folder=tmp_path) as fake:
        fake.fault("machine.refusing")
        refusing = rent(fake, 0)
        fake.fault("machine.udp-filtered")
        _, host, tcp, udp = serve(fake, 4)
        assert refuses(fake.instance(refusing).address, fake.instance(refusing).ports["7070/tcp"])
        assert ask(host, tcp, "who")
        with pytest.raises(TimeoutError):
            ask_udp(host, udp, within_s=0.3)


def test_a_pip_that_is_held_stands_still_and_an_idle_one_has_nothing_to_do(tmp_path):
    with FakeVast(inside=Inside(isolation="plain", pip="idle"), folder=tmp_path) as fake:
        command = {"onstart": "/bin/sh", "args": ["-c", "echo begun; exec python3 -m pip install --quiet tinygrad"]}
        held, free = rent(fake, 0, **command), rent(fake, 4, **command)
        fake.hold(held, "pip")
        fake.clock.advance(60)
        eventually(lambda: fake.log(free) == "begun\nRequirement already satisfied: tinygrad\n")
        eventually(lambda: fake.log(held) == "begun\n")
        fake.let_go(held, "pip")
        eventually(lambda: fake.log(held) == fake.log(free))


@pytest.mark.slow
@pytest.mark.skipif(not NAMESPACES, reason="neither root nor user namespaces")
def test_a_host_without_hairpin_is_not_reached_by_its_peers_and_a_lost_one_by_nobody(tmp_path):
    with FakeVast(inside=Inside(), folder=tmp_path) as fake:
        fake.fault("machine.no-hairpin")
        hidden, open_to_all = serve(fake, 0), serve(fake, 4)
        assert ask(*hidden[1:3], "who")[0] == str(hidden[0])
        assert "refused" in ask(*open_to_all[1:3], "dial {} {} {}".format(*hidden[1:]))
        fake.strike(open_to_all[0], "offline")
        eventually(lambda: refuses(*open_to_all[1:3]))


@pytest.mark.skipif(not NAMESPACES, reason="neither root nor user namespaces")
def test_a_container_reaches_the_api_and_what_it_is_let_to_but_not_the_users_machine(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as home:
        inside = Inside(reach=(allowed.getsockname(),))
        script = (
            "import socket,sys\nfor port in sys.argv[1:]:\n try: socket.create_connection(('127.0.0.1',int(port)),3)\n"
        )
        script += " except OSError as error: print(type(error).__name__)\n else: print('reached')\nprint('done')"
        with FakeVast(inside=inside, folder=tmp_path) as fake:
            ports = [str(one.getsockname()[1]) for one in (allowed, home)] + [fake.url.rpartition(":")[2]]
            made = rent(fake, onstart="python3", args=["-c", script, *ports])
            fake.clock.advance(60)
            eventually(lambda: "done" in fake.log(made))
            assert fake.log(made).split() == ["reached", "ConnectionRefusedError", "reached", "done"]


def test_a_missing_executable_never_starts_and_a_stopped_instance_starts_again(tmp_path):
    with FakeVast(inside=Inside(), folder=tmp_path) as fake:
        missing = rent(fake, 0, onstart="/no/such/program")
        again = rent(fake, 2, args=["-c", "echo started; sleep 1000"])
        fake.clock.advance(60)
        eventually(lambda: show(fake, missing)["actual_status"] == "created")
        assert "OCI runtime create failed" in show(fake, missing)["status_msg"]
        eventually(lambda: fake.log(again).count("started") == 1)
        call(fake, "PUT", f"/api/v0/instances/{again}/", {"state": "stopped"})
        call(fake, "PUT", f"/api/v0/instances/{again}/", {"state": "running"})
        fake.clock.advance(60)
        eventually(lambda: fake.log(again).count("started") == 2)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with one package, a module of one line."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_thing.py", "SIZE = 1\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


INSTALL = (
    "python -m pip install -q --no-input tiny-thing; python -c 'import tiny_thing as t; print(t.__file__)'; echo done"
)


@pytest.mark.slow
def test_pip_inside_installs_into_the_containers_own_environment(wheels, tmp_path):
    """And finds what is installed underneath: pip itself."""
    with FakeVast(inside=Inside(wheels=wheels), folder=tmp_path) as fake:
        made = rent(fake, args=["-c", f"python -m pip install pip; {INSTALL}"])
        fake.clock.advance(60)
        eventually(lambda: "done" in fake.log(made), within_s=60)
        assert "already satisfied: pip" in fake.log(made)
        assert f"{tmp_path}/{made}/venv/lib" in fake.log(made)


@pytest.mark.slow
@pytest.mark.skipif(not NAMESPACES, reason="neither root nor user namespaces")
def test_a_bare_root_has_dash_and_python_and_pip_but_no_curl_git_or_clang(wheels, tmp_path):
    script = (
        f"for x in curl git clang cc sh python pip; do which $x || echo no $x; done; ls -l /bin/sh; {INSTALL}; id -u"
    )
    with FakeVast(inside=Inside(chroot=True, wheels=wheels), folder=tmp_path) as fake:
        made = rent(fake, args=["-c", script.replace("; id -u", "; ls /; echo over")])
        fake.clock.advance(60)
        eventually(lambda: "over" in fake.log(made), within_s=60)
        text = fake.log(made)
    assert [f"no {name}" in text for name in ("curl", "git", "clang", "cc", "sh", "python", "pip")] == [True] * 4 + [
        False
    ] * 3
    assert "/bin/sh -> dash" in text and "site-packages/tiny_thing.py" in text
    assert os.path.basename(str(tmp_path)) not in text.split("done")[1]
    assert not (tmp_path / str(made) / "root" / "bin").exists()  # built in the container's own mounts


GREETER = """
import socket
port = socket.create_server(("0.0.0.0", 7070))
print("listening", flush=True)
while True:
    with port.accept()[0] as connection:
        connection.sendall(b"hello ")
        while data := connection.recv(65536):
            connection.sendall(data)
"""


@pytest.mark.skipif(not NAMESPACES, reason="neither root nor user namespaces")
def test_a_mapped_port_carries_much_in_both_directions_and_a_service_may_speak_first(tmp_path):
    much = os.urandom(1 << 20)
    with FakeVast(inside=Inside(), folder=tmp_path) as fake:
        made = rent(fake, onstart="python3", args=["-c", GREETER])
        fake.clock.advance(60)
        eventually(lambda: "listening" in fake.log(made))
        with socket.create_connection((fake.instance(made).address, fake.instance(made).ports["7070/tcp"]), 10) as port:
            assert port.recv(6, socket.MSG_WAITALL) == b"hello "
            sending = threading.Thread(target=lambda: (port.sendall(much), port.shutdown(socket.SHUT_WR)))
            sending.start()
            received = b"".join(iter(lambda: port.recv(65536), b""))
            sending.join()
    assert received == much
