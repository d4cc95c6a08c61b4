"""The dead-man: its judgement on numbers alone, then the real process against a real, if small, API."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from ppsmoke.rent import boot, dead_man
from ppsmoke.rent.dead_man import Vigil, judge, lifetime_ends, seconds
from ppsmoke.rent.minify import minify
from tests.lab.small_container import INSTANCE, KEY, Api, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a rented container is Linux")

TAKEN = (200, '{"success": true}')
GONE = (404, '{"success": false, "error": "no_such_instance", "msg": "no"}')


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ([((99, 1000), 0)], ""),
        ([((100, 1000), 0)], "lifetime over"),
        ([((1, 2000), 0)], "lifetime over"),  # a machine that slept, or a container that was started again
        ([((1, 1000), 0), ((90, 1000), 0)], ""),  # never heard: the lifetime alone counts
        ([((1, 1000), 7), ((30.9, 1000), 7)], ""),
        ([((1, 1000), 7), ((31, 1000), 7)], "orchestrator silent"),
        ([((1, 1000), 7), ((30, 1000), 8), ((59, 1000), 8)], ""),
        ([((1, 1000), 7), ((30, 1000), 8), ((60, 1000), 8)], "orchestrator silent"),
        ([((1, 1000), 9), ((20, 1000), 3), ((49, 1000), 3)], ""),  # the wall clock went back: still news
        ([((1, 1000), 7), ((20, 1000), 0), ((31, 1000), 0)], "orchestrator silent"),  # a file removed is no news
        ([((1, 1000), 7), ((90, 1000), 8)], ""),  # we were frozen, and so was whoever touches: look before judging
    ],
)
def test_it_is_over_when_the_lifetime_has_passed_on_either_clock_or_after_silence_once_there_was_contact(looks, reason):
    vigil = Vigil([100, 2000], 30)
    assert [vigil.over(clocks, mark) for clocks, mark in looks][-1] == reason


@pytest.mark.parametrize(
    ("text", "value"),
    [("390", 390), ("0.5", 0.5), ("", 900), ("x", 900), ("nan", 900), ("inf", 900), ("-1", 900), ("0", 900)],
)
def test_a_duration_that_makes_no_sense_is_the_default_and_never_for_ever(text, value):
    assert seconds({"PPSMOKE_NODE_LIFETIME_S": text}, "LIFETIME_S", 900) == value


def test_without_a_duration_the_defaults_hold():
    assert seconds({}, "SILENCE_S", dead_man.SILENCE_S) == 120


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (*TAKEN, "asked"),
        (*GONE, "gone"),
        (400, GONE[1], "gone"),  # the same error with another status
        (404, '{"success":false,"error":"not_found"}', "gone"),
        (404, '{"success":false,"error":"auth_error","msg":"Invalid user key"}', "again"),
        (404, "<html>404 Not Found</html>", "again"),
        (429, "API requests too frequent: endpoint threshold=3.0", "again"),
        (200, '{"success":false,"msg":"try later"}', "again"),
        (200, "<html>sign in to this hotel's network</html>", "again"),
        (302, "", "again"),
        (502, "Bad Gateway", "again"),
        (0, "URLError('...')", "again"),
    ],
)
def test_an_answer_is_judged_by_its_body_before_its_status(status, body, verdict):
    assert judge(status, body.encode()) == verdict


def test_a_lifetime_is_kept_over_a_new_start_and_is_never_longer_than_a_fresh_one(tmp_path):
    folder = str(tmp_path / "new")
    assert lifetime_ends(folder, (10.0, 5000.0), 100) == [110.0, 5100.0]
    assert lifetime_ends(folder, (60.0, 5050.0), 100) == [110.0, 5100.0]
    assert lifetime_ends(folder, (3.0, 5060.0), 100) == [103.0, 5100.0]  # the host was started again: its clock is new


@pytest.mark.parametrize("kept", ["", "x\ny\n", "110.0\n"])
def test_a_torn_lifetime_file_counts_as_none(tmp_path, kept):
    (tmp_path / "lifetime").write_text(kept)
    assert lifetime_ends(str(tmp_path), (10.0, 5000.0), 100) == [110.0, 5100.0]
    assert lifetime_ends(str(tmp_path), (60.0, 5050.0), 100) == [110.0, 5100.0]


def test_where_nothing_can_be_written_the_lifetime_still_ends(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert lifetime_ends(str(tmp_path / "file"), (10.0, 5000.0), 100) == [110.0, 5100.0]
    assert "Errno" in capsys.readouterr().out


@contextmanager
def running_dead_man(folder, url, *, source=None, **environment):
    environment = {
        "CONTAINER_ID": INSTANCE,
        "CONTAINER_API_KEY": KEY,
        "PPSMOKE_NODE_DIR": str(folder),
        "PPSMOKE_NODE_LIFETIME_S": "60",
        "PPSMOKE_NODE_RETRY_S": "0.02",
        "VAST_URL": url,
        **environment,
    }
    source = source or minify(*map(boot.program_source, boot.PROGRAMS))[0]
    process = subprocess.Popen(
        [sys.executable, "-ISuc", source], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_asks_until_the_api_says_gone_whatever_comes_between_and_takes_its_key_nowhere_else(tmp_path):
    elsewhere = Api(TAKEN)
    answers = [
        (429, "API requests too frequent"),
        (502, "<html>Bad Gateway</html>"),
        (302, "", {"Location": elsewhere.url + "/api/v0/instances/1/"}),
        (404, '{"error": "auth_error"}'),
        TAKEN,  # and we are still alive
        GONE,
    ]
    with (
        elsewhere,
        Api(*answers) as api,
        running_dead_man(tmp_path, api.url + "/", PPSMOKE_NODE_LIFETIME_S="0.1") as it,
    ):
        said, _ = it.communicate(timeout=20)
    assert it.returncode == 0
    assert {call["path"] for call in api.calls} == {f"/api/v0/instances/{INSTANCE}/"}
    assert {call["key"] for call in api.calls} == {f"Bearer {KEY}"} and {call["agent"] for call in api.calls} == {
        "ppsmoke"
    }
    assert len(api.calls) == len(answers) and elsewhere.calls == []
    assert "lifetime over: DELETE" in said and KEY not in said


def test_refusals_are_waited_out_twice_as_long_each_time_and_a_200_as_long_as_it_may_take(monkeypatch, tmp_path):
    answers = [(429, b""), (0, b"no network"), *[(502, b"")] * 4, (200, b'{"success": true}'), (404, GONE[1].encode())]
    waits, asked = [], []
    moments = iter([(0.0, 0.0), (0.0, 0.0), (390.0, 0.0)])
    monkeypatch.setattr(dead_man, "clocks", lambda: next(moments))
    monkeypatch.setattr(dead_man, "ask", lambda url, key: asked.append((url, key)) or answers[len(asked) - 1])
    monkeypatch.setattr(dead_man.time, "sleep", waits.append)
    monkeypatch.setattr(dead_man.signal, "signal", lambda *_: None)
    dead_man.main(
        {
            "CONTAINER_ID": "1",
            "CONTAINER_API_KEY": "k",
            "PPSMOKE_NODE_DIR": str(tmp_path),
            "PPSMOKE_NODE_LIFETIME_S": "390",
        }
    )
    assert waits == [1, 4, 8, 16, 32, 64, 64, 64]  # the API's documented interval for destroys is 3 s
    assert asked == [("https://console.vast.ai/api/v0/instances/1/", "k")] * 8


@pytest.mark.slow
def test_silence_after_contact_ends_the_machine_and_a_touched_file_does_not(tmp_path):
    with Api(GONE) as api, running_dead_man(tmp_path, api.url, PPSMOKE_NODE_SILENCE_S="2") as it:
        until((tmp_path / "lifetime").exists, "arming")
        heartbeat = tmp_path / "heartbeat"
        heartbeat.touch()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            os.utime(heartbeat)
            time.sleep(0.02)
        assert api.calls == [] and it.poll() is None
        said, _ = it.communicate(timeout=20)
    assert it.returncode == 0 and len(api.calls) == 1 and "orchestrator silent" in said


@pytest.mark.parametrize("missing", ["CONTAINER_ID", "CONTAINER_API_KEY"])
def test_without_its_key_it_says_so_at_once_and_asks_nobody(tmp_path, missing):
    with Api(TAKEN) as api, running_dead_man(tmp_path, api.url, PPSMOKE_NODE_LIFETIME_S="0.05", **{missing: ""}) as it:
        assert it.stdout.readline() == (
            "ppsmoke dead-man: no CONTAINER_API_KEY or CONTAINER_ID: this machine cannot end itself\n"
        )
        with pytest.raises(subprocess.TimeoutExpired):
            it.wait(0.3)
    assert api.calls == []


@pytest.mark.slow
def test_an_api_that_never_answers_is_asked_again(tmp_path):
    source = boot.program_source("dead_man").replace("EXCHANGE_S = 30", "EXCHANGE_S = 1")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.settimeout(20)
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with running_dead_man(tmp_path, url, source=source, PPSMOKE_NODE_LIFETIME_S="0.1"):
            first, _ = deaf.accept()
            second, _ = deaf.accept()
            first.close()
            second.close()


@pytest.mark.slow
def test_a_stdout_that_nobody_holds_does_not_end_it(tmp_path):
    with Api(TAKEN, GONE) as api, running_dead_man(tmp_path, api.url, PPSMOKE_NODE_LIFETIME_S="0.2") as it:
        it.stdout.close()
        assert it.wait(20) == 0
    assert len(api.calls) == 2
