"""Points 1 to 4 of the facts page's list for a faithful fake: transport, keys, broken replies, rate limits."""

from __future__ import annotations

import json
import threading

import pytest

from tests.lab.fake_vast import FakeVast
from tests.lab.fake_vast.clock import Clock
from tests.lab.fake_vast.faults import FaultBox, catalogue, parse_fault
from tests.lab.fake_vast.limits import Limiter
from tests.lab.raw_vast import call, destroy, listed, rent, show


def test_point_1_a_typo_in_a_path_is_a_404_page_and_a_missing_slash_a_308():
    with FakeVast() as fake:
        typo = call(fake, "GET", "/api/v0/instance/7/")
        slash = call(fake, "GET", "/api/v0/instances/7")
    assert (typo.status, typo.headers["Content-Type"].split(";")[0]) == (404, "text/html")
    assert (slash.status, slash.headers["Location"]) == (308, "/api/v0/instances/7/")


def test_point_1_time_stands_still_until_it_is_advanced():
    with FakeVast(start=1_000_000.0) as fake:
        assert fake.clock.now() == 1_000_000.0
        fake.clock.advance(3600)
        assert fake.clock.now() == 1_003_600.0


def test_point_1_time_can_run_faster_than_real():
    real = iter([0.0, 2.0])
    assert Clock(scale=30.0, start=100.0, monotonic=lambda: next(real)).now() == 160.0


def test_point_1_callers_are_served_at_the_same_time():
    with FakeVast() as fake:
        inside, go = threading.Event(), threading.Event()
        fake.on("user", "before", lambda request, instance_id: (inside.set(), go.wait(5)))
        slow = threading.Thread(target=call, args=(fake, "GET", "/api/v0/users/current/"))
        slow.start()
        assert inside.wait(5)
        assert listed(fake)["success"]
        go.set()
        slow.join()


@pytest.mark.parametrize("status", [404, 401])
def test_point_2_a_wrong_key_is_an_auth_error_with_the_status_of_the_day(status):
    with FakeVast(bad_key_status=status) as fake:
        for key in ("wrong", None):
            answer = call(fake, "GET", "/api/v0/users/current/", key=key)
            assert (answer.status, answer.json["error"]) == (status, "auth_error")


def test_point_2_a_key_in_the_url_is_refused_and_remembered():
    with FakeVast() as fake:
        assert call(fake, "GET", "/api/v0/users/current/?api_key=test-key", key=None).status == 400
        assert fake.ledger()["leaks"] == {"key_in_url": 1}


def test_point_2_an_instances_key_may_read_and_destroy_that_instance_alone():
    with FakeVast() as fake:
        mine, other = rent(fake, 0), rent(fake, 2)
        key = fake.instance(mine).api_key
        assert call(fake, "GET", f"/api/v0/instances/{mine}/", key=key).status == 200
        assert call(fake, "GET", f"/api/v0/instances/{other}/", key=key).json["error"] == "auth_error"
        assert destroy(fake, other, key=key).json["error"] == "auth_error"
        assert call(fake, "GET", "/api/v1/instances/", key=key).json["error"] == "auth_error"
        assert destroy(fake, mine, key=key).json["success"]
        assert [line["id"] for line in fake.ledger()["live"]] == [other]


def test_point_2_a_session_can_expire():
    with FakeVast() as fake:
        fake.fault("any.session-expired")
        answer = call(fake, "GET", "/api/v1/instances/")
        assert (answer.status, answer.json["msg"]) == (404, "Session expired. Please log in again.")


@pytest.mark.parametrize(
    ("kind", "status", "content_type", "body"),
    [
        ("502", 502, "text/html", None),
        ("503", 503, "text/html", None),
        ("500", 500, "application/json", None),
        ("empty", 200, "application/json", b""),
        ("null", 200, "application/json", b"null"),
        ("html", 200, "text/html", None),
        ("429", 429, "text/plain; charset=utf-8", b"API requests too frequent: endpoint threshold=3.0"),
        ("403", 403, "application/json", None),
        ("reset", 0, None, b"RemoteDisconnected|ConnectionResetError"),
    ],
)
def test_point_3_any_route_can_break_before_it_does_anything(kind, status, content_type, body):
    with FakeVast() as fake:
        made = rent(fake)
        fake.fault(f"destroy.{kind}")
        answer = destroy(fake, made)
        assert answer.status == status
        assert answer.headers.get("Content-Type") == content_type
        assert body is None or answer.body in body.split(b"|") or answer.body == body
        assert [line["id"] for line in fake.ledger()["live"]] == [made]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("reset-after", 0), ("502-after", 502), ("500-after", 500), ("empty-after", 200), ("null-after", 200),
     ("cut-after", 0), ("hang-after", 0)],
)  # fmt: skip
def test_point_3_any_route_can_break_after_its_effect(kind, status):
    with FakeVast() as fake:
        made = rent(fake)
        fake.fault(f"destroy.{kind}")
        answer = call(fake, "DELETE", f"/api/v0/instances/{made}/", {}, within_s=0.3)
        assert answer.status == status
        assert fake.ledger()["live"] == []


@pytest.mark.parametrize(("kind", "content_type"), [("drip", "application/json"), ("wrong-type", "text/plain")])
def test_point_3_the_true_reply_can_come_slowly_or_under_a_wrong_name(kind, content_type):
    with FakeVast() as fake:
        fake.fault(f"user.{kind}")
        answer = call(fake, "GET", "/api/v0/users/current/")
        assert answer.json["credit"] == 25.0
        assert answer.headers["Content-Type"] == content_type


def test_point_3_a_body_can_be_far_too_large():
    with FakeVast() as fake:
        fake.fault("list.huge")
        assert len(call(fake, "GET", "/api/v1/instances/").body) > 48 << 20


def test_point_3_a_redirect_tells_whether_the_key_went_along():
    with FakeVast() as fake:
        fake.fault("user.redirect", 2)
        assert call(fake, "GET", "/api/v0/users/current/").status == 307
        assert fake.ledger()["leaks"] == {}
        call(fake, "GET", "/api/v0/users/current/", follow=True)
        assert fake.ledger()["leaks"] == {"authorization_leaked": 1}


def test_point_3_faults_strike_as_often_as_armed_after_the_good_calls():
    with FakeVast() as fake:
        fake.fault("user.500", 2, skip=1)
        statuses = [call(fake, "GET", "/api/v0/users/current/").status for _ in range(4)]
        assert statuses == [200, 500, 500, 200]
        assert fake.unused_faults() == []


def test_point_3_a_fault_without_a_count_strikes_until_it_is_taken_back():
    box = FaultBox()
    box.arm("any.429", None)
    assert [box.take("show"), box.take("create"), box.take("machine")] == ["429", "429", None]
    box.disarm("any.429")
    assert box.take("show") is None


def test_point_3_every_fault_of_the_catalogue_can_be_armed_and_nothing_else():
    for name in catalogue():
        assert parse_fault(name) == (name, 1, 0)
        FaultBox().arm(name)
    assert parse_fault("destroy.429:always:2") == ("destroy.429", None, 2)
    for wrong in ("destroy.no-such", "create.race-404:x"):
        with pytest.raises(ValueError):
            parse_fault(wrong)


def test_point_4_calls_come_too_early_by_route_and_by_key():
    limiter = Limiter()
    early = [limiter.too_early("destroy", "key", at) for at in (0.0, 2.9, 3.0, 4.0)]
    assert early == [None, 3.0, None, 3.0]
    assert limiter.too_early("destroy", "another key", 4.0) is None
    assert limiter.too_early("list", "key", 4.0) is None
    assert limiter.violations == {"destroy": 2}


def test_point_4_the_eleventh_search_of_a_minute_is_too_many():
    limiter = Limiter()
    assert [limiter.too_early("search", "key", float(at)) for at in range(11)] == [None] * 10 + [6.0]
    assert limiter.too_early("search", "key", 60.5) is None


def test_point_4_limits_are_answered_in_plain_text_where_they_are_enforced_and_counted_everywhere():
    with FakeVast(enforce_limits=True) as strict:
        made = rent(strict)
        assert show(strict, made) is not None
        refused = call(strict, "GET", f"/api/v0/instances/{made}/")
        assert (refused.status, refused.body) == (429, b"API requests too frequent: endpoint threshold=2.0")
        strict.clock.advance(2)
        assert show(strict, made) is not None
        assert strict.ledger()["too_early"] == {"show": 1}
    with FakeVast() as lenient:
        assert [listed(lenient)["success"] for _ in range(2)] == [True, True]
        assert lenient.ledger()["too_early"] == {"list": 1}


@pytest.mark.parametrize(
    ("kind", "header", "field"),
    [("429-json", None, "retry_after"), ("429-header", "Retry-After", None), ("429-detail", None, "detail")],
)
def test_point_4_a_429_comes_in_several_shapes(kind, header, field):
    with FakeVast() as fake:
        fake.fault(f"list.{kind}")
        answer = call(fake, "GET", "/api/v1/instances/")
        assert answer.status == 429
        assert header is None or answer.headers[header] == "1"
        assert field is None or field in answer.json


def test_point_4_the_daily_search_quota_tells_when_it_ends():
    with FakeVast(start=1_900_000_000.0) as fake:
        fake.fault("search.quota")
        answer = call(fake, "POST", "/api/v0/bundles/", {})
        assert (answer.status, answer.json["error"]) == (429, "search_quota_exceeded")
        assert int(answer.headers["X-RateLimit-Reset"]) == 1_900_022_400


def test_the_ledger_needs_no_key_and_shows_what_was_asked():
    with FakeVast(start=5000.0) as fake:
        listed(fake)
        ledger = json.loads(call(fake, "GET", "/_lab/ledger", key=None).body)
        assert ledger["requests"] == [{"method": "GET", "path": "/api/v1/instances/", "t": 5000.0}]
        assert (ledger["live"], ledger["ended"], ledger["decoys_touched"]) == ([], [], 0)
