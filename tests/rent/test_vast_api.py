"""The client against the fake service: shapes, pages, retries, faults. Time is the fake's: nothing here waits."""

from __future__ import annotations

import asyncio
import random

import pytest

from ppsmoke.rent import vast_api
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.pacer import Route, backoff_s
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.vast_http import UrllibTransport
from ppsmoke.rent.verdicts import (
    AuthRefused,
    BadReply,
    Created,
    CreatedAnyway,
    OfferLost,
    QuotaSpent,
    Refused,
    Unclear,
    Unreachable,
)
from tests.lab.fake_vast import FakeVast
from tests.rent.vast_lab import KEY, FakeTime, client, reply, run, scripted

BODY = {"image": "python:3.12-slim", "disk": 10.0, "env": {}, "label": "x-1", "runtype": "args", "client_id": "me",
        "price": None, "args": [], "onstart": None, "cancel_unavail": True}  # fmt: skip


@pytest.fixture
def fake():
    with FakeVast() as service:
        yield service
        ledger = service.ledger()
        assert ledger["leaks"] == {} and ledger["decoys_touched"] == 0


def make(fake: FakeVast, label: str = "x-1") -> int:
    """An instance that exists, past its first reads."""
    outcome = run(client(fake).create(fake.offers[0].ask_id, {**BODY, "label": label}))
    assert isinstance(outcome, Created)
    return outcome.instance_id


def test_a_life_from_search_to_gone(fake):
    async def life() -> None:
        api = client(fake)
        user = await api.user()
        assert user.credit == 25.0
        offers = await api.search({"rentable": {"eq": True}, "gpu_name": {"eq": "RTX 3090"}})
        assert offers and all(offer.gpu_name == "RTX 3090" for offer in offers)
        assert [offer.dph_total for offer in offers] == sorted(offer.dph_total for offer in offers)
        created = await api.create(offers[3].id, BODY)
        assert isinstance(created, Created)
        fake.clock.advance(120)
        shown = await api.instance(created.instance_id)
        assert shown is not None and shown.label == "x-1" and shown.actual_status == "running"
        assert shown.address == shown.address.strip() != ""
        assert created.instance_id in {one.id for one in (await api.instances()).instances}
        assert "no container" in await api.logs(created.instance_id)
        assert await api.destroy(created.instance_id) is True
        while await api.instance(created.instance_id) is not None:
            pass
        assert await api.destroy(created.instance_id) is False

    run(life())
    assert fake.ledger()["live"] == []


def test_a_search_pages_on_past_the_64_offers_of_a_reply(fake):
    found = run(client(fake).search({"rentable": {"eq": True}}, max_pages=3))
    assert len(found) == len({offer.id for offer in found}) == len(fake.offers) > 64


@pytest.mark.parametrize("extra", [0, 24, 25, 26, 60])
def test_the_list_is_all_pages(extra):
    with FakeVast(decoys=[f"other-{index}" for index in range(extra)]) as fake:
        assert len(run(client(fake).instances()).instances) == extra


@pytest.mark.slow
def test_a_list_that_stumbles_once_is_still_complete(monkeypatch):
    faults = (
        "empty-page moving 429 502 cut-after reset null empty html huge drip 429-json 429-header 429-detail 500 503"
    )
    with FakeVast(decoys=[f"other-{index}" for index in range(30)]) as fake:
        mine = make(fake)
        for fault in faults.split():
            monkeypatch.setattr(vast_api, "EXCHANGE_S", 0.2 if fault == "drip" else 20.0)
            fake.fault(f"list.{fault}")
            assert mine in {one.id for one in run(client(fake).instances()).instances}, fault
        assert fake.unused_faults() == []


def test_a_refused_key_stops_every_call_at_once_and_is_never_not_found(fake):
    api = client(fake)
    for fault in ("401", "404-auth", "session-expired", "two-factor"):
        fake.fault(f"any.{fault}", None)
        for call in (api.instances, api.user, lambda: api.instance(1), lambda: api.destroy(1), lambda: api.search({})):
            before = len(fake.requests)
            with pytest.raises(AuthRefused):
                run(call())
            assert len(fake.requests) == before + 1
        fake.clear_fault(f"any.{fault}")


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_is_told_as_one(status):
    with FakeVast(bad_key_status=status) as fake, pytest.raises(AuthRefused, match="refused the key"):
        run(client(fake, key="not-the-key").user())


def test_a_redirect_is_refused_and_carries_no_key_away(fake):
    fake.fault("any.redirect", None)
    for call in (client(fake).instances, client(fake).user):
        with pytest.raises(BadReply, match="redirect"):
            run(call())
    assert fake.ledger()["leaks"] == {}


def test_a_failed_list_is_never_an_empty_list(fake):
    for fault in ("502", "429", "reset", "null", "empty", "html"):
        fake.fault(f"list.{fault}", None)
        with pytest.raises(Unreachable) as caught:
            run(client(fake).instances(within_s=30.0))
        assert ("wait a minute" if fault == "429" else "check the network") in caught.value.hint
        fake.clear_fault(f"list.{fault}")


@pytest.mark.parametrize("body", [{"instances": None}, {}, {"instances": [{"label": "ours?"}]}, {"instances": [7]},
                                  {"instances": [], "next_token": 7}])  # fmt: skip
def test_a_list_of_another_shape_is_an_error(body):
    api, _ = scripted(reply(200, body))
    with pytest.raises(BadReply):
        run(api.instances())


def test_a_list_that_never_ends_is_an_error():
    page = reply(200, {"instances": [], "next_token": "again"})
    api, _ = scripted(page, page, page)
    with pytest.raises(BadReply, match="does not end"):
        run(api.instances())


@pytest.mark.parametrize(("answer", "meaning"), [
    (reply(200, {"instances": None}), None),
    (reply(200, {"instances": []}), None),
    (reply(404, {"success": False, "error": "no_such_instance", "msg": "x"}), None),
    (reply(404, {"success": False, "error": "not_found"}), None),
    (reply(200, {"instances": [{"id": 5}]}), 5),
    (reply(200, {"instances": {"id": 5}}), 5),
    (reply(200, {}), BadReply),
    (reply(200, {"instances": {"id": 6}}), BadReply),
    (reply(200, {"instances": [{"id": 5}, {"id": 6}]}), BadReply),
    (reply(404, "<html>nothing</html>"), Refused),
    (reply(404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}), AuthRefused),
    (reply(410, {"success": False, "error": "deprecated_endpoint", "msg": "use v1"}), Refused),
])  # fmt: skip
def test_only_the_body_says_that_an_instance_is_gone(answer, meaning):
    api, _ = scripted(answer)
    if meaning in (BadReply, Refused, AuthRefused):
        with pytest.raises(meaning):
            run(api.instance(5))
    else:
        found = run(api.instance(5))
        assert (found and found.id) == meaning


def test_a_lost_offer_means_the_next_offer(fake):
    for fault in ("race-400", "race-404", "race-410", "not-yours", "refused", "empty-400"):
        fake.fault(f"create.{fault}")
        assert isinstance(run(client(fake).create(fake.offers[0].ask_id, BODY)), OfferLost), fault
    assert fake.ledger()["live"] == []


@pytest.mark.parametrize("when", ["", "-after"])
def test_an_unclear_create_is_sent_once_and_called_unclear(fake, when):
    faults = ("reset", "502", "500", "empty", "null", "cut" if when else "503")
    for index, fault in enumerate(faults):
        fake.fault(f"create.{fault}{when}")
        assert isinstance(run(client(fake).create(fake.offers[index].ask_id, BODY)), Unclear), fault
    assert len(fake.requests) == len(faults)
    assert len(fake.ledger()["live"]) == (len(faults) if when else 0)


def test_a_create_that_answers_without_end_is_unclear(fake):
    fake.fault("create.huge")
    outcome = run(client(fake).create(fake.offers[0].ask_id, BODY))
    assert isinstance(outcome, Unclear) and "a body of more than" in outcome.text


def test_an_error_that_made_an_instance_names_it(fake):
    fake.fault("create.error-with-contract")
    outcome = run(client(fake).create(fake.offers[0].ask_id, BODY))
    assert isinstance(outcome, CreatedAnyway)
    assert [one["id"] for one in fake.ledger()["live"]] == [outcome.instance_id]


def test_a_reply_that_never_comes_ends_at_the_deadline(fake, monkeypatch):
    monkeypatch.setattr(vast_api, "CREATE_EXCHANGE_S", 0.2)
    fake.fault("create.hang-after")
    outcome = run(client(fake).create(fake.offers[0].ask_id, BODY))
    assert isinstance(outcome, Unclear) and "0.2 s" in outcome.text


def test_a_long_wait_that_the_service_imposes_is_told_and_a_short_one_is_not(fake):
    said: list[str] = []
    transport = UrllibTransport(fake.url, ApiKey(KEY))
    api = VastApi(transport, clock=FakeTime(fake), rng=random.Random(1), say=said.append)
    fake.fault("search.429", 3)
    run(api.search({"rentable": {"eq": True}}, max_pages=1))
    assert len(said) == 1 and said[0].startswith("search: HTTP 429: ") and "; again in " in said[0]


@pytest.mark.parametrize(("fault", "times"), [("429", 3), ("429-json", 2), ("502", 3), ("reset", 2), ("500", 1)])
def test_a_destroy_is_repeated_until_the_api_takes_it(fake, fault, times):
    instance_id = make(fake)
    fake.fault(f"destroy.{fault}", times)
    assert run(client(fake).destroy(instance_id, within_s=200.0)) is True
    assert fake.ledger()["live"] == []


def test_a_429_makes_every_caller_of_the_route_wait():
    api, transport = scripted(reply(429, "API requests too frequent"), *[reply(200, {"success": True})] * 3)
    times: list[float] = []

    async def three() -> None:
        async def one() -> None:
            await api.destroy(1)
            times.append(api.clock.now())

        await asyncio.gather(one(), one(), one())

    run(three())
    assert len(transport.asked) == 4
    assert api.usage.too_often == 1 and api.usage.calls[Route.DESTROY] == 4
    assert times == sorted(times) and times[2] - times[0] >= 6.9


def test_a_spent_search_quota_is_not_asked_again(fake):
    fake.fault("search.quota", None)
    with pytest.raises(QuotaSpent) as caught:
        run(client(fake).search({}))
    assert caught.value.resets_at is not None and caught.value.resets_at > fake.clock.now()
    assert len(fake.requests) == 1


def test_a_quota_hit_on_the_second_page_keeps_the_first(fake):
    fake.fault("search.quota", None, skip=1)
    assert len(run(client(fake).search({}))) == 64


@pytest.mark.slow
def test_calls_at_our_spacings_are_never_too_early():
    with FakeVast(enforce_limits=True) as fake:
        api = client(fake)

        async def busy() -> None:
            for _ in range(3):
                await asyncio.gather(
                    *[api.instances() for _ in range(4)],
                    *[api.instance(1) for _ in range(4)],
                    *[api.destroy(2) for _ in range(4)],
                    *[api.search({}, max_pages=1) for _ in range(4)],
                )
            for _ in range(4):
                await api.create_turn()
                await api.create(1, BODY)

        run(busy())
        assert fake.ledger()["too_early"] == {} and api.usage.too_often == 0


class LateOnce:
    """A transport whose first request takes so many seconds to its destination."""

    def __init__(self, fake: FakeVast, late_s: float) -> None:
        self._fake, self.late_s = fake, late_s
        self._inner = UrllibTransport(fake.url, ApiKey(KEY))

    def exchange(self, *args, **kwargs):
        late_s, self.late_s = self.late_s, 0.0
        self._fake.clock.advance(late_s)
        return self._inner.exchange(*args, **kwargs)


@pytest.mark.parametrize("late_s", [0.4, 0.9, 30.0])
def test_a_call_that_was_long_on_its_way_is_not_followed_too_soon(late_s):
    with FakeVast(enforce_limits=True) as fake:
        transport = LateOnce(fake, late_s)
        api = VastApi(transport, clock=FakeTime(fake))

        async def two_creates_and_two_reads() -> None:
            for index in range(2):
                await api.create_turn()
                assert isinstance(await api.create(fake.offers[index].ask_id, BODY), Created)
            transport.late_s = late_s
            await api.instances()
            await api.instances()

        run(two_creates_and_two_reads())
        assert fake.ledger()["too_early"] == {} and api.usage.too_often == 0


def test_logs_are_waited_for_and_fetched_without_the_key(fake):
    instance_id = make(fake)
    fake.clock.advance(100)
    assert str(instance_id) in run(client(fake).logs(instance_id, tail=20))
    assert fake.ledger()["leaks"] == {}


def test_logs_that_never_come_are_given_up(fake):
    instance_id = make(fake)
    fake.fault("logs.never", None)
    with pytest.raises(Unreachable, match="did not arrive"):
        run(client(fake).logs(instance_id))


def test_a_cancelled_read_is_left_behind_at_once(fake):
    fake.fault("list.hang")

    async def cancelled() -> None:
        task = asyncio.ensure_future(client(fake).instances())
        while not fake.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())


def test_the_account_has_a_name_and_a_key_without_that_permission_too(fake):
    api = client(fake)
    name = run(api.account())
    assert name.startswith("127.0.0.1:") and name.rsplit("/", 1)[1].isdigit()
    fake.fault("user.403", None)
    limited = run(client(fake).account())
    assert limited.endswith("/key-" + ApiKey(KEY).fingerprint()) and KEY not in limited


def test_backoff_grows_to_a_minute_and_heeds_what_is_asked():
    rng = random.Random(1)
    waits = [backoff_s(attempt, rng=rng, route=Route.LIST) for attempt in range(1, 9)]
    assert 1.6 <= waits[0] <= 2.4 and all(48.0 <= wait <= 72.0 for wait in waits[5:])
    assert backoff_s(1, rng=rng, route=Route.LIST, asked_for=30.0) == 30.0
    assert backoff_s(1, rng=rng, route=Route.LIST, asked_for=86400.0) == 60.0
    assert backoff_s(1, rng=rng, route=Route.CREATE) == 12.0


def test_our_requests_are_the_official_clients_in_method_path_and_body(fake):
    """Captured from vastai 1.9.1 (facts page, section 8). Different on purpose: the slash after users/current, which
    spares a redirect; a tail of our own for logs."""
    instance_id = make(fake)
    fake.clock.advance(100)
    api = client(fake)
    before = len(fake.requests)

    async def calls() -> None:
        await api.instance(instance_id)
        await api.instances()
        await api.logs(instance_id, tail=50)
        await api.destroy(instance_id)
        await api.user()

    run(calls())
    assert [(one.method, one.path, one.body.decode()) for one in fake.requests[before:]] == [
        ("GET", f"/api/v0/instances/{instance_id}/?owner=me", ""),
        ("GET", "/api/v1/instances/?select_filters=%7B%7D&order_by=%5B%7B%22col%22%3A+%22id%22%2C+%22dir%22%3A+%22asc"
                "%22%7D%5D&limit=25", ""),
        ("PUT", f"/api/v0/instances/request_logs/{instance_id}/", '{"tail": "50"}'),
        ("DELETE", f"/api/v0/instances/{instance_id}/", "{}"),
        ("GET", "/api/v0/users/current/", ""),
    ]  # fmt: skip
