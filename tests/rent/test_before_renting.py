"""What comes before the first create: the journal, the address, the plan; and `ls` and `reap` where nobody answers."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import socket
import threading
import time
from contextlib import suppress

import pytest

from ppsmoke.cli import main
from ppsmoke.rent import dead_man, ledger, vast_api
from ppsmoke.rent.find import find_plan
from ppsmoke.rent.offers import Wanted
from ppsmoke.rent.plan import is_settled, make_plan
from ppsmoke.rent.shapes import read_offer
from ppsmoke.rent.vast_api import PATIENCE_S
from ppsmoke.rent.vast_http import check_base_url
from ppsmoke.settings import Settings
from ppsmoke.vast_run import lifetime_s
from tests.lab.fake_vast import FakeVast, offer
from tests.rent.vast_lab import KEY, client, run

SPEED = 100.0  # of the client's and the fake's clocks
WANTED = Wanted(download_bytes=100_000_000)


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A state folder and a fast clock of its own for whatever `main` runs; the epoch that the fake starts at."""
    epoch = time.time()
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PPSMOKE_LAB_CLOCK", f"{SPEED}@{epoch}")
    return epoch


@pytest.fixture
def fake(here, monkeypatch):
    with FakeVast(scale=SPEED, start=here, enforce_limits=True) as service:
        monkeypatch.setenv("VAST_URL", service.url)
        yield service
        assert service.ledger()["live"] == [] and service.ledger()["decoys_touched"] == 0


def no_room(*args) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("what", "words"), [("unwritable", "Not a directory"), ("full", "No space left on device")])
def test_a_state_folder_that_cannot_keep_a_journal_is_known_before_the_first_call(
    what, words, fake, monkeypatch, tmp_path, capsys
):
    if what == "unwritable":
        (tmp_path / "state").write_text("a file where the folder would be")
    else:
        monkeypatch.setattr(ledger, "_sync", no_room)
    assert main(["--vastai", "--model", "smollm2:135m"]) == 1
    assert words in (said := capsys.readouterr().err) and "XDG_STATE_HOME" in said
    assert not fake.requests


def test_a_run_that_rents_nothing_leaves_no_journal(fake, tmp_path, capsys):
    assert main(["--vastai", "--max-usd", "0.002"]) == 1
    assert "the limit is $0.002" in capsys.readouterr().err
    assert os.listdir(tmp_path / "state" / "ppsmoke" / "journal") == []


@pytest.mark.parametrize(("budget_s", "stages", "lifetime"), [(300, 2, 420), (600, 32, 775.5), (86_400, 2, 86_400)])
def test_a_machines_lifetime_outlasts_its_run_and_is_one_that_its_dead_man_believes(budget_s, stages, lifetime):
    settings = Settings(budget_s=budget_s, num_stages=stages)
    assert lifetime_s(settings) == lifetime
    environ = {"PPSMOKE_NODE_LIFETIME_S": f"{lifetime:.0f}"}
    assert dead_man.seconds(environ, "LIFETIME_S", dead_man.LIFETIME_S) == pytest.approx(lifetime, abs=0.5)


# The address


@pytest.mark.parametrize(("typed", "used"), [
    ("https://console.vast.ai/api/v0", "https://console.vast.ai"),
    ("https://console.vast.ai/api/v0/", "https://console.vast.ai"),
    ("https://console.vast.ai/api", "https://console.vast.ai"),
    ("https://proxy.example/vast/api/v1/", "https://proxy.example/vast"),
    ("https://proxy.example/myapi", "https://proxy.example/myapi"),
    ("https://proxy.example/api/v0/more", "https://proxy.example/api/v0/more"),
])  # fmt: skip
def test_an_address_may_be_written_with_the_path_that_every_call_begins_with(typed, used):
    assert check_base_url(typed) == used


def test_ls_works_at_an_address_with_that_path_and_says_what_is_wrong_at_another(fake, monkeypatch, capsys):
    monkeypatch.setenv("VAST_URL", fake.url + "/api/v0/")
    assert main(["ls"]) == 0
    assert "4 other instances on this account" in capsys.readouterr().out
    monkeypatch.setenv("VAST_URL", fake.url + "/elsewhere")
    assert main(["ls"]) == 1
    assert re.search(r"HTTP 404: a page of HTML\n  hint: check VAST_URL", capsys.readouterr().err)


@pytest.mark.parametrize("command", [["ls"], ["reap"], ["ls", "--json"]])
def test_a_dead_address_is_told_at_every_try_and_given_up_after_a_named_time(command, here, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("VAST_URL", f"http://{where}")
    assert main(command) == 1
    said = capsys.readouterr().err.splitlines()
    assert re.match(r"ppsmoke: (list|user): Connection refused; again in \d s", said[0])
    assert re.match(
        rf"ppsmoke: rent: no usable answer from {where} \(\w+\): Connection refused; \d attempts in (\d+) s",
        said[-2],
    )
    assert int(said[-2].split()[-2]) < 2 * PATIENCE_S  # the clock runs on while this machine is busy
    assert "check the network" in said[-1]


def test_a_silent_address_is_told_and_given_up_too(here, monkeypatch, capsys):
    monkeypatch.setattr(vast_api, "EXCHANGE_S", 0.1)
    monkeypatch.setattr(vast_api, "TELL_WAIT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    peers.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("VAST_URL", f"http://{where}")
        assert main(["ls"]) == 1
        server.shutdown(socket.SHUT_RDWR)
    said = capsys.readouterr().err
    assert said.startswith(f"ppsmoke: list: no answer from {where} yet\n")
    assert f"no usable answer from {where} (list): no complete answer within 0.1 s; " in said


# The plan


def searches(fake: FakeVast) -> int:
    return sum(request.method == "POST" for request in fake.requests)


def test_one_search_is_enough_where_nothing_dearer_could_change_the_plan():
    with FakeVast() as fake:
        plan = run(find_plan(client(fake), WANTED, stages=2))
        assert searches(fake) == 1 and plan.offers_seen == 64
        everything = run(client(fake).search(WANTED.search_filters(), max_pages=5))
    whole = make_plan(everything, WANTED, stages=2)
    assert len(everything) > 64 and (plan.chosen, plan.runners_up) == (whole.chosen, whole.runners_up)


def market(seed: int, *, traffic_usd_per_gb: float) -> list:
    """Ninety offers of one model whose prices lie so close that none looks like a trap."""
    chance = random.Random(seed)
    return [
        offer(100 + n, machine_id=1000 + n, host_id=2000 + n, geolocation=chance.choice(["Sweden, SE", "Texas, US"]),
              dph_total=(price := round(chance.uniform(0.2, 0.36), 4)), dph_base=price,
              inet_down_cost=round(chance.uniform(0, traffic_usd_per_gb), 4), inet_down=chance.uniform(300, 2000))
        for n in range(90)
    ]  # fmt: skip


@pytest.mark.parametrize("traffic_usd_per_gb", [0.004, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_that_is_called_settled_is_the_plan_of_the_whole_market(seed, traffic_usd_per_gb):
    whole = [read_offer(one.row) for one in market(seed, traffic_usd_per_gb=traffic_usd_per_gb)]
    cheapest = sorted(whole, key=lambda one: (one.dph_total, one.id))[:64]
    if is_settled(cheapest, WANTED, stages=3):
        one, other = make_plan(cheapest, WANTED, stages=3), make_plan(whole, WANTED, stages=3)
        assert (one.chosen, one.runners_up) == (other.chosen, other.runners_up)
    else:
        assert traffic_usd_per_gb > 0.004


def test_the_next_offers_are_asked_for_where_traffic_makes_the_cheapest_dear():
    with FakeVast(offers=market(1, traffic_usd_per_gb=2.0)) as fake:
        plan = run(find_plan(client(fake), WANTED, stages=2))
        assert searches(fake) == 2 and plan.offers_seen == 90


def test_the_next_offers_are_asked_for_where_a_model_was_seen_too_seldom_to_know_its_price():
    rows = market(2, traffic_usd_per_gb=0.0)
    rows[0].row.update(gpu_name="RTX 4090", dph_total=0.1, dph_base=0.1)
    with FakeVast(offers=rows) as fake:
        run(find_plan(client(fake), WANTED, stages=2))
        assert searches(fake) == 2


# --dry-run


@pytest.mark.parametrize("limit", ["--max-usd", "credit"])
def test_a_dry_run_shows_the_plan_that_a_real_run_would_refuse(limit, fake, capsys):
    arguments = ["--vastai", "--dry-run", "--model", "smollm2:135m"]
    if limit == "credit":
        fake.service.account.credit = 0.001
    else:
        arguments += ["--max-usd", "0.002"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out.startswith("stage 0: ") and "at most $0.04" in out and "offers seen" in out
    assert "ppsmoke: rent: a real run would refuse: " in err and "ppsmoke: searching offers" in err
    assert main([*arguments, "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["chosen"]) == 2 and plan["error"]["cause"].startswith("a real run would refuse: ")
    assert plan["error"]["phase"] == "rent" and plan["error"]["hint"]


def test_a_dry_run_that_a_real_run_would_follow_has_no_error(fake, capsys):
    assert main(["--vastai", "--dry-run", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert "error" not in json.loads(out) and err == ""
    assert {request.method for request in fake.requests} == {"POST", "GET"}


def test_an_interrupted_reap_says_that_something_may_be_left(fake, monkeypatch, capsys):
    async def interrupted(*args, **kwargs) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ppsmoke.vast_cli.settle", interrupted)
    assert main(["reap"]) == 130
    assert capsys.readouterr().err == (
        "ppsmoke: interrupted; what was not seen gone may still be rented: run reap again\n"
    )
