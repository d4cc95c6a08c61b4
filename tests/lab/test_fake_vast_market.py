"""Points 5 to 9 of the facts page's list for a faithful fake: search, and creating an instance."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from tests.lab.fake_vast import FakeVast, default_market, offer
from tests.lab.fake_vast.order import problem
from tests.lab.fake_vast.search import SearchRefused, search
from tests.lab.raw_vast import call, listed, order, rent, show

MARKET = default_market()
NOW = 1_900_000_000.0


def found(query: dict, **options) -> list[dict]:
    return search(MARKET, query, now=NOW, **options)


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        ({"num_gpus": {"eq": "1"}}, lambda row: True),
        ({"gpu_ram": {"gte": 20000.0}}, lambda row: row["gpu_ram"] >= 20000),
        ({"reliability": {"gt": "0.99"}}, lambda row: row["reliability"] > 0.99),
        ({"duration": {"gte": 172800}}, lambda row: row["duration"] >= 172800),
        ({"gpu_name": {"eq": "RTX 4090"}}, lambda row: row["gpu_name"] == "RTX 4090"),
        ({"gpu_name": {"in": ["L4", "RTX 3060"]}}, lambda row: row["gpu_name"] in ("L4", "RTX 3060")),
        ({"geolocation": {"notin": ["CN", "VN"]}}, lambda row: row["geolocation"][-2:] not in ("CN", "VN")),
        ({"geolocation": {"eq": "SE"}}, lambda row: row["geolocation"] == "Sweden, SE"),
        ({"verified": {"eq": True}}, lambda row: row["verification"] == "verified"),
        ({"external": {"eq": False}}, lambda row: not row["external"]),
        ({"driver_version": {"gte": 550054015}}, lambda row: row["driver_vers"] >= 550054015),
        ({"cuda_vers": {"gte": "12.4"}}, lambda row: row["cuda_max_good"] >= 12.4),
        ({"direct_port_count": {"gte": "2", "lt": 100}}, lambda row: 2 <= row["direct_port_count"] < 100),
        ({"ask_contract_id": {"eq": 7000001}}, lambda row: row["id"] == 7000001),
    ],
)
def test_point_5_a_filter_leaves_exactly_what_passes_it_numbers_may_be_strings(filters, holds):
    expected = {one.ask_id for one in MARKET if holds(one.row)}
    ids = {row["id"] for row in found(filters)}
    assert ids and ids <= expected
    assert len(ids) == min(64, len(expected))


@pytest.mark.parametrize(
    "filters", [{"gpu_name": {"eq": "RTX_4090"}}, {"id": {"eq": 7000001}}, {"no_such_field": {"eq": 1}}]
)
def test_point_5_and_6_underscores_ids_and_unknown_fields_find_nothing(filters):
    assert found(filters) == []


def test_point_5_search_works_by_post_and_by_the_old_get():
    query = {"gpu_name": {"eq": "L4"}, "order": [["dph_total", "asc"]], "limit": 3}
    with FakeVast() as fake:
        posted = call(fake, "POST", "/api/v0/bundles/", query).json["offers"]
        got = call(fake, "GET", f"/api/v0/bundles/?q={quote(json.dumps(query))}").json["offers"]
    assert [row["id"] for row in posted] == [row["id"] for row in got]
    assert len(posted) == 3


def test_point_5_the_price_holds_the_storage_that_was_asked_for():
    [small], [large] = (
        found({"ask_contract_id": {"eq": 7000001}, "allocated_storage": storage_gb}) for storage_gb in (10, 740)
    )
    assert large["dph_total"] - small["dph_total"] == pytest.approx(0.15, abs=1e-5)
    assert small["dph_base"] == large["dph_base"]


@pytest.mark.parametrize(
    ("query", "msg"),
    [
        ({"num_gpus": {"is": 1}}, "is is not a valid search op"),
        ({"num_gpus": 0}, "0 is not a valid search op"),
        ({"driver_version": {"gte": "555.0.1"}}, "query values can't be None"),
        ([], "Invalid json body"),
    ],
)
def test_point_6_what_the_service_refuses_is_refused_with_its_words(query, msg):
    with pytest.raises(SearchRefused, match=msg):
        found(query)
    with FakeVast() as fake:
        answer = call(fake, "POST", "/api/v0/bundles/", query)
    assert (answer.status, answer.json["error"], answer.json["msg"]) == (400, "invalid_request", msg)


def test_point_6_a_reply_has_at_most_64_offers_in_the_order_asked_for():
    rows = found({"order": [["dph_total", "asc"]], "limit": 5000})
    assert len(rows) == 64
    assert [row["dph_total"] for row in rows] == sorted(row["dph_total"] for row in rows)
    by_score = found({})
    assert [row["score"] for row in by_score] == sorted((row["score"] for row in by_score), reverse=True)
    assert len(found({"limit": 2})) == 2


def test_point_6_the_market_can_be_walked_to_its_end_by_price():
    seen, least = set(), 0.0
    while fresh := {row["id"]: row["dph_total"] for row in found(
        {"dph_total": {"gte": least}, "order": [["dph_total", "asc"]]}) if row["id"] not in seen}:  # fmt: skip
        seen |= set(fresh)
        least = max(fresh.values())
    assert len(seen) == len(MARKET)


def test_point_6_one_numeric_filter_can_be_ignored():
    tight = {"gpu_ram": {"gte": 80000}, "limit": 64}
    assert {row["gpu_name"] for row in found(tight)} == {"A100 SXM4"}
    assert len({row["gpu_name"] for row in found(tight, sloppy=True)}) > 1
    with FakeVast() as fake:
        fake.fault("search.sloppy")
        assert len(call(fake, "POST", "/api/v0/bundles/", tight).json["offers"]) == 64


def test_point_6_the_market_has_every_decoy_once_nulls_and_two_offers_of_one_machine():
    assert {one.decoy for one in MARKET if one.decoy} == {"cdi", "deverified", "gouging", "portless", "ending"}
    assert MARKET[0].row["machine_id"] == MARKET[1].row["machine_id"]
    assert any(one.row["cpu_ghz"] is None for one in MARKET)
    cheapest = found({"order": [["dph_total", "asc"]], "limit": 5})
    assert {one.ask_id for one in MARKET if one.decoy} == {row["id"] for row in cheapest}


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "-e A=b -p 1:1"}, {"env": {"A": 1}}, {"env": {"-p 7000-7002:7000-7002": "1"}}, {"env": None},
        {"env": {"A": "x" * 257}}, {"env": {f"A{i}": "x" * 256 for i in range(140)}}, {"disk": 7.9}, {"disk": "20"},
        {"image": ""}, {"image": None}, {"runtype": None}, {"runtype": "args2"}, {"runtype": "ssh"}, {"price": 200},
        {"args": ["-c", "x" * 4097]}, {"args": "echo"}, {"label": "x" * 257}, {"id": 7},
        {"env": {f"-p {8000 + i}:{8000 + i}": "1" for i in range(65)}},
    ],
)  # fmt: skip
def test_point_7_a_create_with_something_wrong_is_refused(changes):
    assert problem(order(**changes)) is not None
    with FakeVast() as fake:
        answer = call(fake, "PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/", order(**changes))
        assert (answer.status, answer.json["error"]) == (400, "invalid_args")
        assert fake.ledger()["live"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {}}, {"env": {"-h": "host", "-v /a:/b": "1", "-p 70000:70000": "1"}}, {"price": 0.2}, {"label": None},
        {"runtype": "ssh_direc ssh_proxy", "args": None, "onstart": "echo a b"}, {"args": ["-c", "x" * 4000]},
    ],
)  # fmt: skip
def test_point_7_what_the_official_client_sends_is_accepted(changes):
    assert problem(order(**changes)) is None


def test_point_7_the_reply_holds_new_contract_and_a_key_but_no_id():
    with FakeVast() as fake:
        reply = call(fake, "PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/", order()).json
    assert set(reply) == {"success", "new_contract", "instance_api_key"}
    assert isinstance(reply["new_contract"], int)


def test_point_7_a_shell_line_as_onstart_shows_the_oci_error_later():
    with FakeVast() as fake:
        made = rent(fake, onstart="cd /x && python run.py", args=None)
        fake.clock.advance(60)
        row = show(fake, made)
    assert (row["actual_status"], row["cur_state"]) == ("created", "stopped")
    assert 'exec: "cd /x && python run.py"' in row["status_msg"]


def test_point_8_an_ask_can_be_used_once_and_leaves_the_search():
    with FakeVast() as fake:
        ask = fake.offers[0].ask_id
        rent(fake)
        again = call(fake, "PUT", f"/api/v0/asks/{ask}/", order())
        assert (again.status, again.json["error"]) == (404, "invalid_args")
        assert "no_such_ask" in again.json["msg"]
        assert call(fake, "POST", "/api/v0/bundles/", {"ask_contract_id": {"eq": ask}}).json["offers"] == []


@pytest.mark.parametrize(
    ("kind", "status", "error", "text"),
    [
        ("race-400", 400, "invalid_args", "no_such_ask"),
        ("race-404", 404, "invalid_args", "is not available"),
        ("race-410", 410, "no_such_ask", "no longer available"),
        ("not-yours", 403, "invalid_args", "3586"),
        ("insufficient-credit", 400, "insufficient_credit", ""),
        ("spend-rate-limit", 400, "spend_rate_limit", ""),
    ],
)
def test_point_8_a_create_is_refused_in_every_shape_seen_and_nothing_is_rented(kind, status, error, text):
    with FakeVast() as fake:
        fake.fault(f"create.{kind}")
        answer = call(fake, "PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/", order())
        assert (answer.status, answer.json["error"], text in answer.json["msg"]) == (status, error, True)
        assert fake.ledger()["live"] == []


def test_point_8_a_create_can_fail_without_a_word():
    with FakeVast() as fake:
        path = f"/api/v0/asks/{fake.offers[0].ask_id}/"
        fake.fault("create.refused")
        fake.fault("create.empty-400")
        refused, empty = call(fake, "PUT", path, order()), call(fake, "PUT", path, order())
        assert (refused.status, refused.json["success"]) == (200, False)
        assert (empty.status, empty.body) == (400, b"")
        assert fake.ledger()["live"] == []


def test_point_8_an_error_can_carry_a_contract_whose_storage_is_billed():
    with FakeVast() as fake:
        fake.fault("create.error-with-contract")
        answer = call(fake, "PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/", order(price=0.05))
        made = answer.json["new_contract"]
        assert answer.status == 400
        fake.clock.advance(3600)
        assert show(fake, made)["actual_status"] == "stopped"
        [line] = fake.ledger()["live"]
        assert line["dollars"] == pytest.approx(20 * 0.15 / 730, rel=0.01)


@pytest.mark.parametrize("kind", ["reset-after", "502-after", "cut-after", "hang-after"])
def test_point_9_a_create_whose_reply_is_lost_has_rented_all_the_same(kind):
    with FakeVast() as fake:
        fake.fault(f"create.{kind}")
        answer = call(fake, "PUT", f"/api/v0/asks/{fake.offers[0].ask_id}/", order(label="lost"), within_s=0.3)
        assert answer.status in (0, 502)
        assert [line["label"] for line in fake.ledger()["live"]] == ["lost"]
        assert listed(fake, "?select_filters=" + quote('{"label":{"in":["lost"]}}'))["instances_found"] == 1


def test_point_9_a_new_instance_can_be_missing_from_reads_and_lists_for_a_while():
    with FakeVast(decoys=()) as fake:
        fake.fault("create.invisible")
        made = rent(fake)
        seen = [show(fake, made) is not None, listed(fake)["instances_found"], show(fake, made) is not None]
        assert seen == [False, 0, False]
        assert listed(fake)["instances_found"] == 1


def test_point_9_a_list_can_lag_behind_what_was_created_and_destroyed():
    with FakeVast(decoys=()) as fake:
        old = rent(fake, 0)
        fake.clock.advance(60)
        new = rent(fake, 2)
        call(fake, "DELETE", f"/api/v0/instances/{old}/", {})
        fake.fault("list.lag", 1)
        assert [row["id"] for row in listed(fake)["instances"]] == [old]
        assert new in [row["id"] for row in listed(fake)["instances"]]


def test_point_9_a_price_makes_it_a_bid():
    with FakeVast() as fake:
        bid, on_demand = rent(fake, 0, price=0.2), rent(fake, 2)
        assert (show(fake, bid)["is_bid"], show(fake, on_demand)["is_bid"]) == (True, False)


def test_a_test_can_bring_its_own_market():
    with FakeVast(offers=[offer(1, gpu_name="L4", machine_id=7)]) as fake:
        [row] = call(fake, "POST", "/api/v0/bundles/", {}).json["offers"]
    assert (row["id"], row["ask_contract_id"], row["machine_id"], row["gpu_ram"]) == (1, 1, 7, 23034)
