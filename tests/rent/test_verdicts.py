"""What replies mean: the tables of the wild (facts page, sections 1, 3, 5, 7 and 10)."""

from __future__ import annotations

import pytest

from ppsmoke.rent.verdicts import (
    Accepted,
    AuthRefused,
    BadReply,
    Created,
    CreatedAnyway,
    CreateRefused,
    OfferLost,
    QuotaSpent,
    Refused,
    TooOften,
    Unclear,
    is_already_gone,
    judge,
    judge_create,
    one_line,
    said,
)
from tests.rent.vast_lab import reply

NO_ASK_404 = "error 404/3603: no_such_ask Instance type by id 7 is not available."
NO_ASK_410 = "error 410/3907: no_such_ask Instance type by id 7 is no longer available."


@pytest.mark.parametrize(("status", "body", "verdict"), [
    (200, {"success": True, "new_contract": 7, "instance_api_key": "s"}, Created),
    (200, {"success": True, "new_contract": "7"}, Created),
    (200, {"new_contract": 7}, Created),
    (201, {"success": True, "new_contract": 7}, Created),
    (200, {"success": False, "new_contract": 7, "msg": "bid too low"}, CreatedAnyway),
    (400, {"success": False, "error": "invalid_price", "msg": "too low", "new_contract": 7}, CreatedAnyway),
    (500, {"error": "server_error", "new_contract": 7}, CreatedAnyway),
    (429, {"success": False, "new_contract": 7}, CreatedAnyway),
    (400, {"success": False, "error": "invalid_args", "msg": NO_ASK_404, "ask_id": 7}, OfferLost),
    (400, "no_such_ask", OfferLost),
    (404, {"success": False, "error": "invalid_args", "ask_id": 7, "msg": NO_ASK_404}, OfferLost),
    (404, {"success": False, "error": "invalid_args", "message": "... is not available."}, OfferLost),
    (410, {"success": False, "error": "no_such_ask", "msg": NO_ASK_410}, OfferLost),
    (403, {"success": False, "error": "invalid_args", "msg": "error 403/3586 not your offer"}, OfferLost),
    (400, "", OfferLost),
    (200, {"success": False, "msg": "Required resources are currently unavailable"}, OfferLost),
    (400, {"success": False, "error": "invalid_args", "msg": "error 400/1: Invalid args: disk"}, CreateRefused),
    (400, {"success": False, "error": "invalid_price"}, CreateRefused),
    (400, {"success": False, "error": "insufficient_credit"}, CreateRefused),
    (400, {"success": False, "error": "spend_rate_limit", "msg": "new account"}, CreateRefused),
    (401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}, CreateRefused),
    (404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}, CreateRefused),
    (404, {"success": False, "msg": "Session expired. Please log in again."}, CreateRefused),
    (404, "<!DOCTYPE html><html><body>404</body></html>", CreateRefused),
    (307, "", CreateRefused),
    (429, "API requests too frequent", TooOften),
    (429, "API requests too frequent: endpoint threshold=4.5", TooOften),
    (429, {"detail": "slow down"}, TooOften),
    (200, {}, Unclear),
    (408, "<html>Request Timeout</html>", Unclear),
    (200, {"success": True}, Unclear),
    (200, {"success": True, "new_contract": None}, Unclear),
    (200, {"success": True, "new_contract": True}, Unclear),
    (200, {"success": True, "new_contract": 0}, Unclear),
    (200, "", Unclear),
    (200, "null", Unclear),
    (200, '{"success": true, "new_con', Unclear),
    (200, "[" * 100_000, Unclear),
    (500, {"success": False, "error": "server_error", "msg": "Something went wrong on the server"}, Unclear),
    (502, "<html>Bad Gateway</html>", Unclear),
])  # fmt: skip
def test_a_create_is_judged_by_its_body_before_its_status(status, body, verdict):
    assert type(judge_create(reply(status, body))) is verdict


def test_an_id_in_an_error_is_the_instance_to_end_and_the_error_says_what_next():
    money = {"success": False, "error": "insufficient_credit", "new_contract": 7}
    outcome = judge_create(reply(400, money))
    assert isinstance(outcome, CreatedAnyway) and outcome.instance_id == 7
    assert isinstance(outcome.because, CreateRefused) and "credit" in outcome.because.error.hint


def test_the_secret_in_a_create_reply_goes_no_further():
    outcome = judge_create(reply(200, {"success": True, "new_contract": 7, "instance_api_key": "s3cret"}))
    assert outcome == Created(7) and "s3cret" not in repr(outcome)


@pytest.mark.parametrize(("answer", "verdict"), [
    (reply(200, {"success": True}), Accepted),
    (reply(200, {"instances": None}), Accepted),
    (reply(200, {"success": False, "msg": "queued"}), Refused),
    (reply(200, "null"), Unclear),
    (reply(200, "[]"), Unclear),
    (reply(200, ""), Unclear),
    (reply(200, "<html>Maintenance</html>"), Unclear),
    (reply(503, ""), Unclear),
    (reply(308, "", location="https://elsewhere"), BadReply),
    (reply(401, "nope"), AuthRefused),
    (reply(403, {"success": False, "error": "not_authorized"}), AuthRefused),
    (reply(404, {"error": "auth_error"}), AuthRefused),
    (reply(401, {"msg": "Two Factor Authentication is required"}), AuthRefused),
    (reply(404, "<html>"), Refused),
    (reply(410, {"error": "deprecated_endpoint", "msg": "use v1"}), Refused),
    (reply(400, {"error": "invalid_request", "msg": "0 is not a valid search op"}), Refused),
    (reply(429, "API requests too frequent"), TooOften),
    (reply(429, {"success": False, "error": "search_quota_exceeded"}, x_ratelimit_reset="1800000000"), QuotaSpent),
])  # fmt: skip
def test_any_other_reply_is_judged_by_its_body_too(answer, verdict):
    assert type(judge(answer)) is verdict


@pytest.mark.parametrize(("answer", "wait_s"), [
    (reply(429, "API requests too frequent"), None),
    (reply(429, {"retry_after": 7}), 7.0),
    (reply(429, {"retry_after": "7"}), 7.0),
    (reply(429, "", retry_after="3"), 3.0),
    (reply(429, "", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), None),
    (reply(429, {"retry_after": -1}), None),
    (reply(429, {"retry_after": "nan"}), None),
])  # fmt: skip
def test_a_429_may_say_how_long_to_wait(answer, wait_s):
    verdict = judge(answer)
    assert isinstance(verdict, TooOften) and verdict.wait_s == wait_s


@pytest.mark.parametrize(("answer", "gone"), [
    (reply(404, {"success": False, "error": "no_such_instance", "msg": "x"}), True),
    (reply(400, {"success": False, "error": "no_such_instance"}), True),
    (reply(200, {"success": False, "msg": "no_such_instance: 7"}), True),
    (reply(404, {"success": False, "error": "not_found"}), True),
    (reply(404, {"success": False, "error": "auth_error"}), False),
    (reply(404, "<html>"), False),
    (reply(404, ""), False),
    (reply(400, {"success": False, "error": "invalid_args"}), False),
    (reply(429, "API requests too frequent"), False),
    (reply(200, {"success": True}), False),
])  # fmt: skip
def test_already_gone_is_what_the_body_says_never_a_status(answer, gone):
    assert is_already_gone(judge(answer)) is gone


def test_a_services_words_are_one_short_line_without_control_characters():
    assert said(reply(400, {"error": "a", "msg": "b\n\x1b[2Jc", "message": "a"})) == "a: b [2Jc"
    assert said(reply(502, "<html><body>x</body></html>")) == "a page of HTML"
    assert said(reply(400, "")) == "an empty body"
    assert len(one_line("x" * 9999)) == 300
