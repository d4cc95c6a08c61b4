"""Which offer a stage is given next: never one that was tried, on a failed machine, beside another stage, too dear."""

import pytest

from ppsmoke.errors import RentError
from ppsmoke.rent.find import find_plan
from ppsmoke.rent.market import MAX_LOST, Market
from ppsmoke.rent.offers import Wanted
from ppsmoke.rent.shapes import read_offer
from tests.lab.fake_vast import FakeVast, offer
from tests.rent.vast_lab import client, run

WANTED = Wanted(download_bytes=100_000_000)


def offers(*prices: float, **more):
    return [
        offer(100 + n, machine_id=1000 + n, host_id=2000 + n, dph_total=price, dph_base=price, **more)
        for n, price in enumerate(prices)
    ]


async def market(fake: FakeVast) -> Market:
    api = client(fake)
    return Market(api, await find_plan(api, WANTED, stages=2))


def test_the_plan_comes_first_then_what_is_cheapest_on_another_machine():
    with FakeVast(offers=offers(0.10, 0.11, 0.12, 0.13)) as fake:

        async def story() -> list[int]:
            it = await market(fake)
            taken = [await it.take(0), await it.take(1), await it.take(0), await it.take(1)]
            return [one.offer.id for one in taken]

        assert run(story()) == [100, 101, 102, 103]


def test_no_offer_is_tried_twice_and_a_new_search_finds_what_has_come_meanwhile():
    with FakeVast(offers=offers(0.10, 0.11)) as fake:

        async def story() -> int:
            it = await market(fake)
            await it.take(0), await it.take(1)
            with pytest.raises(RentError, match="no other offer is left"):
                await it.take(0)
            fake.service.account.offers[900] = offer(900, machine_id=1900, host_id=2900, dph_total=0.1, dph_base=0.1)
            return (await it.take(0)).offer.id

        assert run(story()) == 900


def test_what_costs_more_than_was_agreed_to_is_not_taken():
    with FakeVast(offers=offers(0.10, 0.11)) as fake:

        async def story() -> None:
            it = await market(fake)
            await it.take(0), await it.take(1)
            fake.service.account.offers[900] = offer(900, machine_id=1900, host_id=2900, dph_total=0.5, dph_base=0.5)
            with pytest.raises(RentError, match="no other offer is left"):
                await it.take(0)

        run(story())


def test_a_host_that_would_not_be_ready_in_time_is_no_replacement():
    with FakeVast(offers=offers(0.10, 0.11, 0.11)) as fake:

        async def story() -> None:
            it = await market(fake)
            await it.take(0), await it.take(1)
            with pytest.raises(RentError, match="ready in the 30 s that are left"):
                await it.take(0, within_s=30.0)
            assert (await it.take(0, within_s=90.0)).offer.id == 102

        run(story())


def test_a_failed_machine_is_not_rented_again_under_another_offer():
    with FakeVast(offers=[*offers(0.10, 0.11), offer(500, machine_id=1000, host_id=2000, dph_total=0.1)]) as fake:

        async def story() -> None:
            it = await market(fake)
            first = await it.take(0)
            it.failed(first.offer)
            with pytest.raises(RentError):
                await it.take(0)

        run(story())


def test_lost_races_have_an_end():
    with FakeVast(offers=offers(0.10, 0.11)) as fake:
        it = run(market(fake))
        one = read_offer(fake.offers[0].row)
        for _ in range(MAX_LOST - 1):
            it.lost(one, "gone", stage=0)
        with pytest.raises(RentError, match=f"{MAX_LOST} offers could not be had"):
            it.lost(one, "gone", stage=0)
