"""How a host's coming up is judged: the states and words of the field, pass by pass, on a clock of numbers."""

import pytest

from ppsmoke.rent.shapes import Instance
from ppsmoke.rent.starting import Bad, Starting, Up, lost

PORTS = {"7070/tcp": 40123, "7071/udp": 40124}


def instance(status: str | None = "loading", **more) -> Instance:
    fields = {"id": 1, "actual_status": status, "cur_state": "running", "intended_status": "running"}
    return Instance(**{**fields, "address": "198.51.100.7", **more})


def starting(pull_s: float = 10.0) -> Starting:
    return Starting(made_at=0.0, pull_s=pull_s)


def test_a_healthy_host_is_waited_for_and_is_up_with_its_ports():
    it = starting()
    for now, status in enumerate([None, "created", "loading", "loading"]):
        assert it.see(instance(status), now * 5.0) is None
    assert it.see(instance("running"), 20.0) is None  # the ports come a moment later
    assert it.see(instance("running", ports=PORTS), 25.0) == Up("198.51.100.7", 40123, 40124)
    assert it.see(instance("running", ports={"7070/tcp": 40123}), 30.0) == Up("198.51.100.7", 40123, None)


@pytest.mark.parametrize(
    ("message", "another"),
    [
        ("failed to inject CDI devices: unresolvable CDI devices D.1/gpu=0", "may help"),
        ("nvidia-container-cli: initialization error: driver error", "may help"),
        ("toomanyrequests: You have reached your pull rate limit.", "may help"),
        ("write /var/lib/docker/x: no space left on device", "may help"),
        ("Error response from daemon: something of that host's own", "may help"),
        ("Error response from daemon: pull access denied for x, repository does not exist: denied", "is futile"),
        ("Error response from daemon: manifest for x not found: manifest unknown", "is futile"),
        ('OCI runtime create failed: exec: "cd /x": stat cd /x: no such file or directory: unknown', "is futile"),
    ],
)
def test_the_words_of_a_host_that_will_never_start_tell_whether_another_may(message, another):
    verdict = starting().see(instance("created", status_msg=message), 5.0)
    assert isinstance(verdict, Bad) and verdict.another == another and message in verdict.why


def test_a_message_that_went_stale_does_not_condemn_a_host_that_runs():
    stale = instance("running", ports=PORTS, status_msg="Error response from daemon: toomanyrequests")
    assert isinstance(starting().see(stale, 5.0), Up)


def test_without_any_change_for_the_predicted_pull_and_45_s_it_is_stalled_and_a_change_counts_anew():
    it = starting(pull_s=10.0)
    assert it.see(instance(status_msg="a: Pulling fs layer"), 0.0) is None
    assert it.see(instance(status_msg="a: Pulling fs layer"), 54.0) is None
    assert it.see(instance(status_msg="a: Pull complete"), 54.5) is None
    assert it.see(instance(status_msg="a: Pull complete"), 109.0) is None
    verdict = it.see(instance(status_msg="a: Pull complete"), 110.0)
    assert isinstance(verdict, Bad) and "stalled" in verdict.why and "a: Pull complete" in verdict.why


def test_running_without_the_port_is_bad_after_a_minute_only():
    it = starting()
    udp_alone = instance("running", ports={"7071/udp": 40124})
    assert it.see(udp_alone, 10.0) is None and it.see(udp_alone, 69.0) is None
    verdict = it.see(udp_alone, 70.0)
    assert isinstance(verdict, Bad) and "7071/udp" in verdict.why


def test_an_exit_counts_when_three_looks_in_a_row_show_it_and_a_missed_heartbeat_when_two_do():
    it = starting()
    verdicts = [it.see(instance(status), 5.0 * n) for n, status in enumerate(["exited", "exited", "loading", "exited"])]
    assert verdicts == [None] * 4 and it.see(instance("exited"), 20.0) is None
    assert isinstance(it.see(instance("exited"), 25.0), Bad)
    for status in ("offline", "unknown"):
        it = starting()
        assert it.see(instance(status), 0.0) is None and isinstance(it.see(instance(status), 5.0), Bad)


def test_an_instance_that_is_not_in_the_list_may_be_new_and_has_vanished_when_it_was_there():
    it = starting()
    assert it.see(None, 5.0) is None and it.see(None, 59.0) is None
    assert isinstance(starting().see(None, 60.0), Bad)
    assert it.see(instance(), 59.5) is None and it.see(None, 64.0) is None
    assert isinstance(it.see(None, 69.0), Bad)


def test_a_stop_nobody_asked_for_and_a_bid_nobody_made_are_bad():
    stopped = {"cur_state": "stopped", "intended_status": "stopped"}
    verdict = starting().see(instance("created", status_msg="why", **stopped), 5.0)
    assert isinstance(verdict, Bad) and "why" in verdict.why
    bid = starting().see(instance("loading", is_bid=True), 5.0)
    assert isinstance(bid, Bad) and bid.another == "is futile"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (None, "vanished"),
        (instance("stopped", cur_state="stopped", intended_status="stopped"), "stopped without our asking"),
        (instance("running", next_state="unloaded"), "being destroyed"),
        (instance("offline"), ""),  # its link may work all the same
        (instance("exited"), ""),
        (instance("running"), ""),
    ],
)
def test_of_a_host_that_was_up_only_what_is_definite_counts(row, words):
    assert words in lost(row) and bool(lost(row)) == bool(words)
