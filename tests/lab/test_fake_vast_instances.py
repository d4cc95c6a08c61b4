"""Points 10 to 12 of the facts page's list for a faithful fake: reading, the timeline, machines that misbehave."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from tests.lab.fake_vast import FakeVast
from tests.lab.fake_vast.faults import MACHINES
from tests.lab.fake_vast.instances import STRIKES, timeline
from tests.lab.fake_vast.market import offer
from tests.lab.raw_vast import call, listed, order, rent, show


def statuses(fake: FakeVast, instance_id: int, *, until_s: float, step_s: float = 1.0) -> list:
    """The actual_status at every step, repetitions left out."""
    seen = []
    for _ in range(int(until_s / step_s)):
        row = show(fake, instance_id)
        status = "gone" if row is None else row["actual_status"]
        if not seen or seen[-1] != status:
            seen.append(status)
        fake.clock.advance(step_s)
    return seen


def test_point_10_one_object_stands_under_the_plural_key_and_null_for_what_is_unknown():
    with FakeVast() as fake:
        made = rent(fake)
        reply = call(fake, "GET", f"/api/v0/instances/{made}/?owner=me")
        unknown = call(fake, "GET", "/api/v0/instances/12345/")
    assert reply.json["instances"]["id"] == made
    assert (unknown.status, unknown.json) == (200, {"instances": None})


def test_point_10_the_old_list_is_gone_unless_the_roll_out_has_not_come_yet():
    with FakeVast() as fake:
        gone = call(fake, "GET", "/api/v0/instances/")
        assert (gone.status, gone.json["error"]) == (410, "deprecated_endpoint")
        fake.fault("list.v0-open")
        assert call(fake, "GET", "/api/v0/instances/").json["instances_found"] == 5


def test_point_10_the_list_comes_in_pages_of_25_at_most():
    with FakeVast(decoys=[f"other-{index}" for index in range(60)]) as fake:
        first = listed(fake, "?limit=1000")
        sizes, ids, token = [], [], first["next_token"]
        page = first
        while True:
            sizes.append(page["instances_found"])
            ids += [row["id"] for row in page["instances"]]
            token = page["next_token"]
            if token is None:
                break
            page = listed(fake, f"?after_token={quote(token)}")
        assert (sizes, len(set(ids)), first["total_instances"]) == ([25, 25, 10], 60, 60)
        assert ids == sorted(ids)
        assert listed(fake, "?limit=0")["instances_found"] == 5


@pytest.mark.parametrize(
    ("query", "error", "msg"),
    [
        ('?select_filters={"dph_total":{"gt":1}}', "invalid_request", "dph_total is not a valid search key"),
        ('?select_filters={"label":{"like":"x"}}', "invalid_request", "like is not a valid search op"),
        ("?after_token=abc", "invalid_token", None),
    ],
)
def test_point_10_filters_on_computed_columns_and_foreign_tokens_are_refused(query, error, msg):
    with FakeVast() as fake:
        answer = call(fake, "GET", "/api/v1/instances/" + quote(query, safe="?=&"))
        assert (answer.status, answer.json["error"]) == (400, error)
        assert msg is None or answer.json["msg"] == msg


def test_point_10_labels_are_counted_and_can_be_filtered_null_too():
    with FakeVast(decoys=(None, "a", "a", "b")) as fake:
        assert listed(fake)["label_counts"] == {"": 1, "a": 2, "b": 1}
        for labels, count in ((["a", "b"], 3), ([None], 1)):
            text = quote(json.dumps({"label": {"in": labels}}))
            assert listed(fake, f"?select_filters={text}")["instances_found"] == count


def test_point_10_rows_can_come_and_go_between_two_pages():
    with FakeVast(decoys=[f"other-{index}" for index in range(30)]) as fake:
        fake.fault("list.moving")
        first = listed(fake)
        second = listed(fake, f"?after_token={quote(first['next_token'])}")
        labels = [row["label"] for row in second["instances"]]
        assert labels[-1] == "came-between-two-pages"
        assert second["total_instances"] == 30


def test_point_10_a_page_can_be_empty_and_yet_not_the_last():
    with FakeVast() as fake:
        fake.fault("list.empty-page")
        empty = listed(fake)
        assert (empty["instances"], empty["next_token"] is None) == ([], False)
        assert listed(fake, f"?after_token={quote(empty['next_token'])}")["instances_found"] == 5


def test_point_11_a_healthy_instance_goes_from_null_over_created_and_loading_to_running():
    with FakeVast() as fake:
        made = rent(fake, image="some/image:tag")
        before = show(fake, made)
        assert statuses(fake, made, until_s=60) == [None, "created", "loading", "running"]
        row = show(fake, made)
        messages = {phase.msg for phase in fake.instance(made).phases if phase.status == "loading"}
    assert (before["ports"], before["disk_usage"], before["disk_util"]) == (None, -1, -1)
    assert len(messages) > 4 and any("Pulling from" in text for text in messages)
    assert row["public_ipaddr"].endswith("\n")
    assert ["STAGE", "0"] in row["extra_env"]
    assert (row["direct_port_start"], row["direct_port_end"]) == (-1, -1)
    assert set(row["ports"]) == {"7070/tcp", "7071/udp"}
    outside = row["ports"]["7070/tcp"][0]["HostPort"]
    assert isinstance(outside, str) and outside != "7070"
    assert row["status_msg"].startswith("success, running")


def test_point_11_a_larger_image_takes_longer_where_the_line_is_slower():
    fast, slow = (
        timeline("", order(), offer(1, inet_down=inet_down), now=0.0, image_gb=1.0)[-1].at for inet_down in (2000, 100)
    )
    assert (fast, slow) == (pytest.approx(12.0), pytest.approx(88.0))


def test_point_11_a_number_from_70000_on_is_a_token_for_the_same_port_on_both_sides():
    with FakeVast() as fake:
        made = rent(fake, env={"-p 70000:70000": "1", "-p 70001:70001/udp": "1"})
        fake.clock.advance(60)
        ports = show(fake, made)["ports"]
    assert len(ports) == 2
    assert all(name.split("/")[0] == value[0]["HostPort"] for name, value in ports.items())


def test_point_11_the_machines_of_one_host_share_its_address():
    with FakeVast() as fake:
        one, same, other = (show(fake, rent(fake, index))["public_ipaddr"] for index in (0, 1, 4))
    assert one == same != other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "seen", "cur_state", "text"),
    [
        ("cdi", [None, "created", "loading", "created"], "stopped", "failed to inject CDI devices"),
        ("oci", [None, "created", "loading", "created"], "stopped", "no such file or directory"),
        ("pull-denied", [None, "created", "loading"], "running", "denied"),
        ("manifest-unknown", [None, "created"], "running", "manifest unknown"),
        ("registry-limit", [None, "created", "loading"], "running", "toomanyrequests"),
        ("stuck-null", [None], "running", None),
        ("stuck-loading", [None, "created", "loading"], "running", "Pulling"),
        ("slow-pull", [None, "created", "loading", "running"], "running", "success"),
        ("exited", [None, "created", "loading", "exited"], "running", "exited"),
        ("no-ports", [None, "created", "loading", "running"], "running", "success"),
        ("port-missing", [None, "created", "loading", "running"], "running", "success"),
        ("refusing", [None, "created", "loading", "running"], "running", "success"),
        ("udp-filtered", [None, "created", "loading", "running"], "running", "success"),
        ("no-hairpin", [None, "created", "loading", "running"], "running", "success"),
        ("no-key", [None, "created", "loading", "running"], "running", "success"),
        ("late-running", [None, "created", "loading", "running"], "running", "success"),
        ("false-exited", [None, "created", "loading", "running", "exited", "running"], "running", "success"),
        ("offline", [None, "created", "loading", "running", "offline"], "running", "success"),
        ("unknown", [None, "created", "loading", "running", "unknown"], "running", "success"),
        ("outbid", [None, "created", "loading", "running", "stopped"], "stopped", "success"),
        ("credit-stop", [None, "created", "loading", "running", "stopped"], "stopped", "success"),
        ("vanish", [None, "created", "loading", "running", "gone"], None, None),
    ],
)
def test_point_12_every_machine_misbehaves_as_its_name_says(script, seen, cur_state, text):
    with FakeVast() as fake:
        fake.fault(f"machine.{script}")
        made = rent(fake)
        assert statuses(fake, made, until_s=150, step_s=2.0) == seen
        row = show(fake, made)
        assert (row or {}).get("cur_state") == cur_state
        assert text is None or text in row["status_msg"]


def test_point_12_every_machine_fault_has_its_row_above():
    marks = test_point_12_every_machine_misbehaves_as_its_name_says.pytestmark
    cases = next(mark.args[1] for mark in marks if mark.name == "parametrize")
    assert {f"machine.{case[0]}" for case in cases} == set(MACHINES)


@pytest.mark.parametrize(("script", "ports"), [("no-ports", None), ("port-missing", {"7071/udp"}), ("cdi", None)])
def test_point_12_running_is_not_reachable(script, ports):
    with FakeVast() as fake:
        fake.fault(f"machine.{script}")
        made = rent(fake)
        fake.clock.advance(60)
        shown = show(fake, made)["ports"]
    assert shown is None if ports is None else set(shown) == ports


def test_point_12_a_machine_fault_can_wait_for_its_machine():
    with FakeVast() as fake:
        bad = fake.offers[2].row["machine_id"]
        fake.fault("machine.stuck-loading", None, machine_id=bad)
        good, stuck = rent(fake, 0), rent(fake, 2)
        fake.clock.advance(100)
        assert (show(fake, good)["actual_status"], show(fake, stuck)["actual_status"]) == ("running", "loading")


@pytest.mark.parametrize("name", sorted(STRIKES))
def test_point_12_what_befalls_a_running_machine_can_befall_it_now(name):
    with FakeVast() as fake:
        made = rent(fake)
        fake.clock.advance(60)
        fake.strike(made, name)
        row = show(fake, made)
        expected = {"false-exited": "exited", "outbid": "stopped", "credit-stop": "stopped", "vanish": "gone"}
        assert ("gone" if row is None else row["actual_status"]) == expected.get(name, name)


def test_point_12_what_an_instance_shows_can_be_cut_short_and_a_start_that_hung_can_go_on():
    with FakeVast() as fake:
        fake.fault("machine.stuck-loading")
        made = rent(fake)
        fake.clock.advance(600)
        assert show(fake, made)["actual_status"] == "loading"
        fake.come_up(made)
        fake.clock.advance(10)
        assert show(fake, made)["actual_status"] == "running" and show(fake, made)["ports"]
        fake.cut(made, status="exited")
        fake.clock.advance(600)
        assert show(fake, made)["actual_status"] == "exited" and fake.instance(made).serving_since(fake.clock.now())


def test_point_12_a_machine_without_free_ports_runs_without_them():
    with FakeVast() as fake:
        portless = next(index for index, one in enumerate(fake.offers) if one.decoy == "portless")
        made = rent(fake, portless)
        fake.clock.advance(60)
        row = show(fake, made)
        assert (row["actual_status"], row["ports"]) == ("running", None)


def test_an_env_can_be_dropped_in_silence():
    with FakeVast() as fake:
        fake.fault("create.env-dropped")
        made = rent(fake)
        fake.clock.advance(60)
        row = show(fake, made)
        assert (row["extra_env"], row["ports"]) == ([], None)
