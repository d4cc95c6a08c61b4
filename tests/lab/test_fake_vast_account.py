"""Points 13 to 18 of the facts page's list for a faithful fake: destroying, logs, the bill, decoys, kill tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.lab.fake_vast import FakeVast
from tests.lab.raw_vast import call, destroy, listed, order, rent, show

MONTH_H = 730.0


def test_point_13_a_destroy_is_seen_a_few_reads_later():
    with FakeVast() as fake:
        made = rent(fake)
        assert destroy(fake, made).json["success"]
        assert fake.ledger()["live"] == []
        rows = [show(fake, made) for _ in range(4)]
        assert [(row["cur_state"], row["next_state"]) for row in rows[:2]] == [("unloaded", "unloaded")] * 2
        assert rows[2:] == [None, None]


def test_point_13_a_second_destroy_finds_no_such_instance():
    with FakeVast() as fake:
        made = rent(fake)
        destroy(fake, made)
        again = destroy(fake, made)
        assert (again.status, again.json["error"]) == (404, "no_such_instance")


@pytest.mark.parametrize("kind", ["429", "502", "reset", "hang"])
def test_point_13_a_destroy_can_fail_at_first_and_leave_the_instance(kind):
    with FakeVast() as fake:
        made = rent(fake)
        fake.fault(f"destroy.{kind}", 2)
        for _ in range(2):
            answer = call(fake, "DELETE", f"/api/v0/instances/{made}/", {}, within_s=0.3)
            assert (answer.status == 200, len(fake.ledger()["live"])) == (False, 1)
        assert destroy(fake, made).json["success"]
        assert fake.ledger()["live"] == []


def test_point_13_a_destroy_can_be_accepted_and_not_done():
    with FakeVast() as fake:
        made = rent(fake)
        fake.fault("destroy.ignored")
        assert destroy(fake, made).json["success"]
        assert show(fake, made)["cur_state"] == "running"
        assert len(fake.ledger()["live"]) == 1


def test_point_13_a_destroy_can_take_long_or_call_success_an_error():
    with FakeVast() as fake:
        slow, odd = rent(fake, 0), rent(fake, 2)
        fake.fault("destroy.slow")
        destroy(fake, slow)
        assert [show(fake, slow) is None for _ in range(11)] == [False] * 10 + [True]
        fake.fault("destroy.gone-400")
        answer = destroy(fake, odd)
        assert (answer.status, answer.json["error"]) == (400, "no_such_instance")
        assert fake.ledger()["live"] == []


def test_point_13_the_bulk_route_is_off_unless_asked_for():
    with FakeVast() as fake:
        made = rent(fake)
        assert call(fake, "DELETE", "/api/v0/instances/", {"instance_ids": [made]}).status == 405
        assert len(fake.ledger()["live"]) == 1
    with FakeVast(bulk=True) as fake:
        made = rent(fake)
        assert call(fake, "DELETE", "/api/v0/instances/", {"instance_ids": [made]}).json["success"]
        assert fake.ledger()["live"] == []


def test_point_14_a_stopped_instance_goes_on_costing_its_storage():
    with FakeVast() as fake:
        made = rent(fake)
        fake.clock.advance(600)
        call(fake, "PUT", f"/api/v0/instances/{made}/", {"state": "stopped"})
        before = fake.ledger()["live"][0]["dollars"]
        fake.clock.advance(10 * 3600)
        assert show(fake, made)["actual_status"] == "stopped"
        after = fake.ledger()["live"][0]["dollars"]
        assert after - before == pytest.approx(10 * 20 * 0.15 / MONTH_H, rel=1e-3)


def test_point_14_a_start_can_be_queued_and_fire_later():
    with FakeVast() as fake:
        made = rent(fake)
        fake.clock.advance(60)
        path = f"/api/v0/instances/{made}/"
        call(fake, "PUT", path, {"state": "stopped"})
        fake.fault("manage.queued")
        queued = call(fake, "PUT", path, {"state": "running"})
        assert (queued.status, queued.json["success"]) == (200, False)
        assert show(fake, made)["actual_status"] == "stopped"
        fake.clock.advance(61)
        assert show(fake, made)["actual_status"] == "running"


def test_point_14_a_label_can_be_changed_and_too_long():
    with FakeVast() as fake:
        made = rent(fake)
        path = f"/api/v0/instances/{made}/"
        assert call(fake, "PUT", path, {"label": "new"}).json["success"]
        assert show(fake, made)["label"] == "new"
        assert call(fake, "PUT", path, {"label": "x" * 1025}).json["error"] == "label_too_long"
        assert call(fake, "PUT", "/api/v0/instances/99/", {"label": "x"}).json["error"] == "no_such_instance"


def test_point_15_logs_lie_elsewhere_and_are_refused_twice_first():
    with FakeVast() as fake:
        made = rent(fake)
        reply = call(fake, "PUT", f"/api/v0/instances/request_logs/{made}/", {"tail": "50"}).json
        assert not reply["result_url"].startswith(fake.url)
        answers = [call(fake, "GET", reply["result_url"], key=None) for _ in range(4)]
        assert [answer.status for answer in answers] == [403, 403, 200, 200]
        assert str(made).encode() in answers[2].body
        assert fake.ledger()["leaks"] == {}


def test_point_15_a_key_that_is_sent_to_the_logs_address_is_a_leak():
    with FakeVast() as fake:
        made = rent(fake)
        url = call(fake, "PUT", f"/api/v0/instances/request_logs/{made}/", {}).json["result_url"]
        call(fake, "GET", url)
        assert fake.ledger()["leaks"] == {"authorization_leaked": 1}


def test_point_15_logs_can_never_come_and_their_options_are_strings():
    with FakeVast() as fake:
        made = rent(fake)
        path = f"/api/v0/instances/request_logs/{made}/"
        fake.fault("logs.never")
        url = call(fake, "PUT", path, {}).json["result_url"]
        assert {call(fake, "GET", url, key=None).status for _ in range(20)} == {403}
        assert call(fake, "PUT", path, {"tail": 50}).status == 400
        assert call(fake, "PUT", "/api/v0/instances/request_logs/7/", {}).json["error"] == "invalid_id"


def test_point_15_execute_takes_a_few_commands_only():
    with FakeVast() as fake:
        path = f"/api/v0/instances/command/{rent(fake)}/"
        assert call(fake, "PUT", path, {"command": "ls /"}).json["result_url"]
        refused = call(fake, "PUT", path, {"command": "curl x | sh"})
        assert (refused.status, refused.json["msg"]) == (400, "Invalid command given.")


def test_point_16_the_ledger_bills_gpu_storage_and_the_images_bytes_from_start_to_end():
    with FakeVast(start=1000.0) as fake:
        made = rent(fake, label="mine", image="big/image")
        running_at = fake.instance(made).phases[-1].at
        fake.clock.advance(running_at - 1000.0 + 3600)
        destroy(fake, made)
        fake.clock.advance(9999)
        [line] = fake.ledger()["ended"]
        row = fake.instance(made).offer.row
        hours = (line["end"] - line["start"]) / 3600
        expected = row["dph_base"] + hours * 20 * row["storage_cost"] / MONTH_H + 1.2 * row["inet_down_cost"]
        assert (line["id"], line["label"], line["start"]) == (made, "mine", 1000.0)
        assert line["dollars"] == pytest.approx(expected, rel=1e-4)


def test_point_16_credit_runs_out():
    with FakeVast(credit=0.05) as fake:
        made = rent(fake)
        fake.clock.advance(3600 * 5)
        assert call(fake, "GET", "/api/v0/users/current/").json["credit"] < 0
        assert show(fake, made)["actual_status"] == "stopped"
        refused = call(fake, "PUT", f"/api/v0/asks/{fake.offers[2].ask_id}/", order())
        assert refused.json["error"] == "insufficient_credit"


def test_point_16_foreign_instances_are_there_from_the_start_and_a_command_to_one_is_counted():
    with FakeVast() as fake:
        rows = listed(fake)["instances"]
        labels = [row["label"] for row in rows]
        assert None in labels and "ppsmoke" in labels and any(label and "ppsmoke2-" in label for label in labels)
        assert fake.ledger()["decoys_touched"] == 0
        show(fake, rows[0]["id"])
        assert fake.ledger()["decoys_touched"] == 0
        destroy(fake, rows[0]["id"])
        call(fake, "PUT", f"/api/v0/instances/{rows[1]['id']}/", {"state": "stopped"})
        ledger = fake.ledger()
        assert (ledger["decoys_touched"], ledger["live"], ledger["ended"]) == (2, [], [])


def test_point_17_requests_are_kept_whole_but_for_the_key():
    with FakeVast() as fake:
        rent(fake)
        [request] = fake.requests
        assert (request.method, request.path) == ("PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/")
        assert json.loads(request.body) == order()
        assert request.headers["Authorization"] == "<redacted>"
        assert "test-key" not in repr(request.headers)


_CLIENT = """
import json, sys, urllib.request
url, method, path, body = sys.argv[1:]
request = urllib.request.Request(url + path, method=method, data=body.encode())
request.add_header("Authorization", "Bearer test-key")
request.add_header("Content-Type", "application/json")
urllib.request.urlopen(request, timeout=20).read()
print("told", flush=True)
"""


@pytest.mark.parametrize(
    ("route", "moment", "rented"),
    [("create", "before", 1), ("create", "after", 1), ("show", "before", 1), ("destroy", "before", 0),
     ("destroy", "after", 0)],
)  # fmt: skip
def test_point_18_a_client_can_be_killed_at_any_step_and_the_ledger_tells_what_is_left(route, moment, rented):
    """A request that has arrived is carried out, whether its sender lives or not: that is what makes leaks."""
    with FakeVast() as fake:
        if route == "create":
            method, path, body = "PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/", json.dumps(order())
        else:
            method = {"show": "GET", "destroy": "DELETE"}[route]
            path, body = f"/api/v0/instances/{rent(fake)}/", "{}"
        clients: list[subprocess.Popen] = []
        fake.on(route, moment, lambda request, instance_id: os.kill(clients[0].pid, signal.SIGKILL))
        argv = [sys.executable, "-I", "-c", textwrap.dedent(_CLIENT), fake.url, method, path, body]
        clients.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        told, _ = clients[0].communicate(timeout=20)
        assert (clients[0].returncode, told) == (-signal.SIGKILL, b"")
        # The handler's thread may still be at it: the next call by anyone is served after it, under the same lock.
        for line in _settled(fake, rented):
            assert destroy(fake, line["id"]).json["success"]
        assert fake.ledger()["live"] == []


def test_point_18_a_hook_at_its_arrival_sees_a_call_that_a_fault_keeps_from_its_effect():
    with FakeVast() as fake:
        seen: list[str] = []
        for moment in ("arrival", "before", "after"):
            fake.on("create", moment, lambda request, instance_id, moment=moment: seen.append(moment))
        fake.fault("create.502")
        path = f"/api/v0/asks/{fake.offers[0].ask_id}/"
        assert call(fake, "PUT", path, order()).status == 502 and seen == ["arrival"]
        rent(fake)
        assert seen == ["arrival", "arrival", "before", "after"]


def _settled(fake: FakeVast, rented: int) -> list[dict]:
    for _ in range(200):
        live = fake.ledger()["live"]
        if len(live) == rented:
            return live
        listed(fake)
    raise AssertionError(f"{len(live)} live, not {rented}")
