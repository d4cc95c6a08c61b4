"""The rented run as a user starts it, against the fake: what it answers, says and costs, and that nothing stays rented.

The rows of tests/lab/rent_table.py are the failures, one each: of the specification's section 6, and of the facts
page's section 10. Left out of these: 7 (every run reads `null` after a destroy), 14 (we use no SSH), 20 (we never stop
an instance, so nothing is queued), 29 (`price` is null: test_create's golden body), 30 (we have no client library),
31 (the fake answers 403 twice for every log; rows 3 and 11 show the log's end). Kills are in test_vast_kill.py.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ppsmoke.cli import main
from tests.lab import bare_run
from tests.lab.expected import expected
from tests.lab.fake_vast.containers import way_in
from tests.lab.marked import marked
from tests.lab.paths import TINY_F32
from tests.lab.range_server import serving
from tests.lab.rent_table import ROWS, Row, run_row
from tests.lab.rented import KEY, Deed, Lab, rented

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are processes in namespaces")
QUICK = {"fewer than two offers"}


def marks(row: Row):
    return [] if row.name in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row), id=f"{row.source} {row.name}") for row in ROWS])
def test_what_goes_wrong_is_named_and_nothing_stays_rented(row, tmp_path):
    run_row(row, tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a computing stage needs Python 3.11")
@pytest.mark.slow
def test_two_rented_stages_answer_what_llama_cpp_answers_and_the_key_is_nowhere(tmp_path):
    with serving(TINY_F32.read_bytes()) as served:
        port = int(served.url.split(":")[2].split("/")[0])
        inside = {"reach": (("127.0.0.1", port),)}
        holders: list[tuple[int, str]] = []
        looks = [Deed(words, lambda lab, run: holders.extend(_who_holds(KEY))) for words in ("running, its", "ready: ")]
        with rented(tmp_path, boots=True, model=served.url, inside=inside) as lab:
            options = ("--max-tokens", "16", "--prompt", "the quick brown fox", "--wire-dtype", "float32")
            run = lab.start("--vastai", "--json", "--model", lab.model, *options)
            ended = lab.end_of(run, time.monotonic(), looks)
            sent = [f"{one.path} {one.headers} {one.body!r}" for one in lab.fake.requests]
    assert ended.status == 0, ended.stderr
    out, oracle = ended.json, expected(TINY_F32.name, "hello", "chat")
    assert out["token_ids"] == oracle["steps"]["ids"][: len(out["token_ids"])] and len(out["token_ids"]) >= 8
    assert [rental["ended"] for rental in out["rentals"]] == ["destroyed"] * 2
    assert 0 < out["cost_usd"] < 0.02 and ended.ledger["live"] == [] and len(ended.ledger["ended"]) == 2
    assert ended.ledger["decoys_touched"] == 0 and not marked(str(lab.home / "tmp"))
    assert not os.listdir(tmp_path / "state" / "ppsmoke" / "journal")
    assert holders == [(run.pid, "environ")] * 2
    assert KEY not in ended.stdout + ended.stderr + "".join(sent) and not ended.ledger["leaks"]
    for path in (tmp_path / "state").rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


def _who_holds(text: str) -> list[tuple[int, str]]:
    """Every process of this machine with the text in its command line or its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                if entry.name.isdigit() and text.encode() in (entry / name).read_bytes():
                    found.append((int(entry.name), name))
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a computing stage needs Python 3.11")
@pytest.mark.skipif(way_in("best") is None, reason="neither root nor user namespaces")
@pytest.mark.skipif(sys.base_prefix == "/usr", reason="a bare file system needs a Python that has a folder of its own")
@pytest.mark.skipif(shutil.which("clang") is None, reason="a stage that computes on the CPU needs clang")
@pytest.mark.slow
def test_our_zipapp_alone_makes_stages_of_bare_containers_with_pip(tmp_path):
    python = f"{sys.base_prefix}/bin/python3"
    wheels = bare_run.download(python, tmp_path / "wheels", *bare_run.PACKAGES)
    with serving(TINY_F32.read_bytes()) as served:
        port = int(served.url.split(":")[2].split("/")[0])
        inside = bare_run.bare(python, wheels, reach=(("127.0.0.1", port),))
        with rented(tmp_path, boots=True, scale=2.0, model=served.url, inside=inside) as lab:
            options = ("--max-tokens", "16", "--prompt", "the quick brown fox", "--wire-dtype", "float32")
            ended = bare_run.run_zipapp(lab, python, *options, key=KEY)
            said = lab.fake.log(ended.json["rentals"][0]["instance_id"])
    assert ended.status == 0, ended.stderr
    oracle = expected(TINY_F32.name, "hello", "chat")
    assert ended.json["token_ids"] == oracle["steps"]["ids"][: len(ended.json["token_ids"])]
    assert "pip ended with status 0 (1 of 3 tries)" in said and not ended.ledger["live"]


@pytest.mark.slow
def test_stages_that_do_not_compute_answer_in_any_number(tmp_path):
    with rented(tmp_path, boots=True) as lab:
        ended = lab.run("--stages", "3", "--max-tokens", "8", "--max-usd", "5")
    assert ended.status == 0 and len(ended.json["token_ids"]) == 8, ended.stderr
    assert len({rental["host_id"] for rental in ended.json["rentals"]}) == 3


def test_a_dry_run_shows_the_plan_and_rents_nothing(tmp_path):
    with rented(tmp_path, boots=False) as lab:
        process = lab.start("--vastai", "--dry-run", "--json", "--gpu", "rtx_4090", "--region", "se,US,ca,bg,pl")
        ended = lab.end_of(process, time.monotonic())
    plan = json.loads(ended.stdout)
    assert ended.status == 0, ended.stderr
    assert [one["gpu"] for one in plan["chosen"]] == ["RTX 4090"] * 2 and plan["most_usd"] < 1
    assert plan["removed"] and plan["runners_up"] and plan["acceptable"] < plan["offers_seen"]
    assert {request["method"] for request in ended.ledger["requests"]} == {"POST", "GET"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "status", "words"),
    [
        ("\n", 1, "not confirmed"),
        ("y\n", 1, "manifest unknown"),
    ],
)
def test_on_a_terminal_it_asks_before_the_first_create(typed, status, words, tmp_path):
    with rented(tmp_path, boots=False) as lab:
        lab.fake.fault("machine.manifest-unknown", None)
        said, exit_status = _in_a_terminal(lab, typed)
        made = len(lab.fake.ledger()["ended"])
        assert not lab.fake.ledger()["live"]
    assert exit_status == status and "[y/N]" in said and "at most $" in said and words in said
    assert bool(made) == (typed == "y\n")


@pytest.mark.slow
def test_a_key_typed_on_a_terminal_is_asked_for_and_not_shown(tmp_path):
    with rented(tmp_path, boots=False) as lab:
        said, exit_status = _in_a_terminal(lab, f"{KEY}\n", "ls", "--api-key", "-", at="API key:", key=None)
    assert exit_status == 0 and "1 of other runs" in said and KEY not in said


@pytest.mark.slow
def test_reap_all_asks_about_what_is_nobodys_for_sure_and_leaves_it_without_a_yes(tmp_path):
    with rented(tmp_path, boots=False) as lab:
        said, exit_status = _in_a_terminal(lab, "\n", "reap", "--all")
        assert lab.fake.ledger()["decoys_touched"] == 0
    assert exit_status == 0 and "end these too" in said and "left alone" in said and "of ours" not in said


def _in_a_terminal(lab: Lab, typed: str, *command: str, at: str = "[y/N]", key: str | None = KEY) -> tuple[str, int]:
    """A run, or another command, at a terminal of its own, where this is typed once it asks."""
    ours, theirs = pty.openpty()
    command = command or ("--vastai", "--model", lab.model)
    process = lab.start(*command, key=key, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:
            break
        if not data:
            break
        if at.encode() in (said + data) and at.encode() not in said:
            os.write(ours, typed.encode())
        said += data
    os.close(ours)
    return said.decode(errors="replace"), process.wait()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--vastai", "--model", str(TINY_F32)], 2, "cannot read"),
        (["--gpu", "RTX_4090"], 2, "--vastai"),
        (["--dry-run"], 2, "--vastai"),
        (["--vastai", "--baked"], 2, "--image"),
        (["--vastai", "--region", "Sweden"], 2, "--region"),
        (["--vastai", "--disk", "4"], 2, "--disk"),
        (["--vastai", "--max-usd", "nan"], 2, "--max-usd"),
        (["--vastai", "--prompt", "-", "--api-key", "-"], 2, "stdin"),
        (["--vastai", "--api-key", ""], 2, "API key"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_network_is_touched(
    arguments, status, words, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("VAST_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(arguments) == status
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_second_signal_does_not_skip_destroying_and_says_what_is_still_open(number, tmp_path):
    again = [
        Deed(words, lambda lab, run: run.send_signal(number)) for words in ("rent: stage 0: inst", "ending the stages")
    ]
    told = threading.Event()  # no end of an instance is answered before the second signal is
    again.append(Deed("again: still ending", lambda lab, run: told.set()))
    with rented(tmp_path, boots=False) as lab:
        lab.fake.on("destroy", "arrival", lambda request, instance_id: told.wait(60))
        lab.fake.fault("destroy.429")
        run = lab.start("--vastai", "--json", "--model", lab.model)
        ended = lab.end_of(run, time.monotonic(), again)
    assert ended.status == 128 + number and "again: still ending the stages" in ended.stderr, ended.stderr
    made = {rental["instance_id"] for rental in ended.json["rentals"]}
    assert any(f"not yet confirmed as ended: {one}" in ended.stderr for one in made)
    assert not ended.ledger["live"] and ended.ledger["decoys_touched"] == 0


@pytest.mark.slow
def test_reap_and_ls_tell_what_is_there_and_touch_nothing_of_others(tmp_path):
    with rented(tmp_path, boots=False) as lab:
        listed, reaped, dry = lab.command("ls", "--json"), lab.command("reap"), lab.command("reap", "--dry-run")
        assert (listed.status, reaped.status, dry.status) == (0, 0, 0), reaped.stderr
        assert [row["whose"] for row in json.loads(listed.stdout)] == ["other_run"]
        assert "left alone" in reaped.stdout and lab.fake.ledger()["decoys_touched"] == 0


@pytest.mark.slow
def test_reap_ends_what_a_killed_run_left_and_the_next_run_would_have_done_so_too(tmp_path):
    with rented(tmp_path, boots=False) as lab:
        run = lab.start("--vastai", "--model", lab.model)
        while not lab.fake.ledger()["live"]:
            time.sleep(0.01)
        for process in marked(str(lab.home / "tmp")):
            os.kill(process.pid, 9)
        run.communicate()
        assert lab.fake.ledger()["live"]
        reaped = lab.command("reap")
        assert reaped.status == 0 and "destroyed" in reaped.stdout, reaped.stderr
        assert not lab.fake.ledger()["live"] and lab.fake.ledger()["decoys_touched"] == 0
