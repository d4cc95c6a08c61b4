"""The official client against the fake: what it sends is what the facts page recorded, and it is content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.fake_vast import FakeVast
from tests.lab.raw_vast import call

VERSION = "1.9.1"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vastai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official client in a throw-away virtual environment; skips where it cannot be installed."""
    folder = tmp_path_factory.mktemp("official")
    steps = ([sys.executable, "-m", "venv", str(folder)],
             [str(folder / "bin/pip"), "install", "-q", "--no-input", f"vastai=={VERSION}"])  # fmt: skip
    for argv in steps:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=420)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"vastai {VERSION} cannot be installed here: {error}")
        if done.returncode:
            pytest.skip(f"vastai {VERSION} cannot be installed here: {done.stderr[-300:]}")
    return folder / "bin" / "vastai"


class Official:
    """The client with a home of its own and no way to any other address than the fake's."""

    def __init__(self, program: Path, fake: FakeVast, home: Path) -> None:
        self._program, self._fake = program, fake
        self._env = {
            "HOME": str(home), "PATH": os.environ["PATH"], "VAST_URL": fake.url, "VAST_API_KEY": fake.key,
            "LANG": "C.UTF-8", "VASTAI_NO_UPDATE_CHECK": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def run(self, *argv: str) -> str:
        done = subprocess.run([str(self._program), *argv], env=self._env, stdin=subprocess.DEVNULL, timeout=60,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def sent(self, *argv: str) -> list[tuple[str, str, Any]]:
        """(method, path, body) of the calls that a command makes, without those of a first start."""
        before = len(self._fake.requests)
        self.run(*argv)
        calls = self._fake.requests[before:]
        return [
            (one.method, one.path, json.loads(one.body) if one.body else None)
            for one in calls
            if one.path.partition("?")[0] not in ("/api/v0/gpu_names/unique/", "/api/v0/users/current")
        ]


@pytest.fixture
def fake():
    with FakeVast() as opened:
        yield opened


@pytest.fixture
def official(vastai, fake, tmp_path) -> Official:
    return Official(vastai, fake, tmp_path)


ORDER_BY = "%5B%7B%22col%22%3A+%22id%22%2C+%22dir%22%3A+%22asc%22%7D%5D"
LIST = f"/api/v1/instances/?select_filters=%7B%7D&order_by={ORDER_BY}&limit=25"


def test_search_create_show_list_logs_and_destroy_work_and_are_sent_as_recorded(official, fake):
    query = "gpu_name=RTX_4090 num_gpus=1 gpu_ram>=20 reliability>0.98 duration>=2 geolocation notin [CN,VN]"
    query += " direct_port_count>=2"
    [search] = official.sent("search", "offers", query, "-o", "dph_total", "--limit", "5")
    assert search == ("POST", "/api/v0/bundles/", {
        "verified": {"eq": True}, "external": {"eq": False}, "rentable": {"eq": True}, "gpu_name": {"eq": "RTX 4090"},
        "num_gpus": {"eq": "1"}, "gpu_ram": {"gte": 20000.0}, "reliability": {"gt": "0.98"},
        "duration": {"gte": 172800.0}, "geolocation": {"notin": ["CN", "VN"]}, "direct_port_count": {"gte": "2"},
        "order": [["dph_total", "asc"]], "type": "on-demand", "limit": 5, "allocated_storage": 5.0,
    })  # fmt: skip
    offers = json.loads(official.run("search", "offers", query, "-o", "dph_total", "--limit", "5", "--raw"))
    assert len(offers) == 5 and {one["gpu_name"] for one in offers} == {"RTX 4090"}

    ask = offers[0]["id"]
    create = ["create", "instance", str(ask), "--image", "I", "--disk", "40", "--label", "run-1", "--cancel-unavail"]
    create += ["--env", "-e A=b -e C=d=e -p 8080:8080 -p 8081:8081/udp -p 70000:70000", "--args", "-c", "echo hi"]
    [created] = official.sent(*create)
    assert created == ("PUT", f"/api/v0/asks/{ask}/", {
        "client_id": "me", "image": "I", "price": None, "disk": 40.0, "label": "run-1", "extra": None, "onstart": None,
        "env": {"A": "b", "C": "d=e", "-p 8080:8080": "1", "-p 8081:8081/udp": "1", "-p 70000:70000": "1"},
        "image_login": None, "python_utf8": False, "lang_utf8": False, "use_jupyter_lab": False, "jupyter_dir": None,
        "force": False, "cancel_unavail": True, "template_hash_id": None, "user": None, "runtype": "args",
        "args": ["-c", "echo hi"],
    })  # fmt: skip
    [line] = fake.ledger()["live"]
    made = str(line["id"])
    fake.clock.advance(100)

    assert official.sent("show", "instance", made, "--raw") == [("GET", f"/api/v0/instances/{made}/?owner=me", None)]
    assert json.loads(official.run("show", "instance", made, "--raw"))["actual_status"] == "running"
    assert official.sent("show", "instances", "--raw") == [("GET", LIST, None)]
    assert f'"id": {made}' in official.run("show", "instances", "--raw")
    assert official.sent("label", "instance", made, "x") == [("PUT", f"/api/v0/instances/{made}/", {"label": "x"})]

    logs = official.sent("logs", made, "--tail", "50", "--filter", "container")
    assert logs == [("PUT", f"/api/v0/instances/request_logs/{made}/", {"filter": "container", "tail": "50"})]
    assert f"container {made}" in official.run("logs", made)

    assert official.sent("destroy", "instance", made, "-y") == [("DELETE", f"/api/v0/instances/{made}/", {})]
    ledger = fake.ledger()
    assert (ledger["live"], ledger["decoys_touched"], ledger["leaks"]) == ([], 0, {})


def test_its_exit_status_hides_failures_and_it_repeats_a_create(official, fake):
    """Why ppsmoke does not wrap it (facts page, sections 7 and 8)."""
    fake.fault("create.502-after")
    sent = official.sent("create", "instance", str(fake.offers[0].ask_id), "--image", "I", "--disk", "10", "--ssh")
    assert len(sent) > 1 and len(fake.ledger()["live"]) == 1
    assert call(fake, "GET", "/api/v0/users/current/").status == 200
    assert official.run("destroy", "instance", "999", "-y") is not None  # 404, and yet exit status 0
