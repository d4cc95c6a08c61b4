"""The rented run: settle what dead runs left, find a plan, show it and what it can cost, ask, then the common story."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from ppsmoke import smoke
from ppsmoke.errors import RentError
from ppsmoke.package import build_zipapp
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.clock import RealClock
from ppsmoke.rent.find import find_plan
from ppsmoke.rent.gpu_names import gpu_name
from ppsmoke.rent.ledger import Journal
from ppsmoke.rent.offers import Wanted
from ppsmoke.rent.plan import Plan
from ppsmoke.rent.reap import settle, settled_lines
from ppsmoke.rent.reaper import Reaper
from ppsmoke.rent.terms import DEFAULT_IMAGE, Terms, needs_of
from ppsmoke.rent.vast_api import PATIENCE_S, VastApi
from ppsmoke.rent.vast_fleet import VastFleet, destroy_budget_s
from ppsmoke.rent.vast_http import check_base_url
from ppsmoke.rent.verdicts import AuthRefused, BadReply, Refused
from ppsmoke.report.progress import Progress
from ppsmoke.settings import RentSettings, Settings, state_dir

LIFETIME_SLACK_S = 30.0  # of a machine, beyond the run's budget and the time to destroy: then it ends itself
MAX_LIFETIME_S = 86_400.0  # a dead-man takes a longer one for a typing error, and ends its machine after 15 minutes
EXPECTED_SHARE = 0.8  # of the budget, that a usual run rents for
URL_VARIABLE = "VAST_URL"


def open_api(key: ApiKey, say: Callable[[str], None], *, patience_s: float = float("inf")) -> VastApi:
    """A client of the account, at VAST_URL where that is set. `say` gets a line for what keeps somebody waiting,
    `patience_s` is the most that any one request may take."""
    clock = RealClock.from_environment(os.environ)
    return VastApi.open(key, _url(), clock=clock, patience_s=patience_s, say=say)


async def run(
    settings: Settings, rent: RentSettings, key: ApiKey, commit: str, progress: Progress, say: Callable[[str], None]
) -> None:
    """Ask once, on rented machines. Raises SmokeError; what is rented by then is destroyed, or named as left over."""
    settings = replace(settings, lifetime_s=lifetime_s(settings))
    terms = Terms(
        image=rent.image or DEFAULT_IMAGE,
        baked=rent.baked,
        disk_gb=rent.disk_gb,
        vast_url=_url(),
        forbidden=(key.reveal(), settings.run_key.hex()),
    )
    wanted = wanted_of(settings, rent, terms)
    progress.phase("rent")
    api = open_api(key, progress.say)
    # Before anything is waited for: a folder that cannot be written, or a full disk, means rent nothing.
    journal = Journal.start(state_dir(), settings.run_id, at=api.clock.wall())
    try:
        account = await api.account()
        await _settle(api, progress)
        plan = await find_plan(api, wanted, stages=settings.num_stages)
        plan.check(max_usd=rent.max_usd, credit=await _credit(api))
        await _agree(plan, rent, progress)

        def open_fleet(progress: Progress) -> VastFleet:
            return VastFleet(
                api,
                plan,
                terms,
                journal,
                account=account,
                lifetime_s=wanted.lifetime_s,
                code=b"" if rent.baked else build_zipapp(commit),
                start_reaper=lambda journal: Reaper.start(journal, key=key, url=_url(), account=account),
                progress=progress,
            )

        await smoke.run(settings, progress, open_fleet, say)
    finally:
        progress.phase("")
        journal.close()


async def dry_run(
    settings: Settings, rent: RentSettings, key: ApiKey, say: Callable[[str], None]
) -> tuple[str, RentError | None]:
    """The plan as text, or as JSON, and why a real run would refuse it; rents nothing and touches nothing. Raises
    RentError where there is no plan. `say` gets a line for what takes time."""
    terms = Terms(image=rent.image or DEFAULT_IMAGE, baked=rent.baked, disk_gb=rent.disk_gb)
    api = open_api(key, say, patience_s=PATIENCE_S)
    say(f"searching offers at {api.host}: what fits, and some seconds later what there is")
    plan = await find_plan(api, wanted_of(settings, rent, terms), stages=settings.num_stages, thorough=True)
    refusal = None
    try:
        plan.check(max_usd=rent.max_usd, credit=await _credit(api))
    except RentError as error:
        refusal = RentError(f"a real run would refuse: {error.cause}", phase=error.phase, hint=error.hint)
    if settings.as_json:
        return json.dumps(plan.to_json() | ({"error": refusal.to_json()} if refusal else {})), refusal
    return "\n".join(plan.to_lines()), refusal


def check(settings: Settings) -> None:
    """Raises UsageError or InputError for a model that rented machines cannot have, before anything is touched."""
    needs_of(settings.model, settings.num_stages, Terms())


def wanted_of(settings: Settings, rent: RentSettings, terms: Terms) -> Wanted:
    """What each machine must be. Raises UsageError or InputError for a model that rented machines cannot have."""
    needs = needs_of(settings.model, settings.num_stages, terms)
    return Wanted(
        download_bytes=needs.download_bytes,
        disk_gb=rent.disk_gb,
        gpu_name=gpu_name(rent.gpu) if rent.gpu else "",
        min_gpu_ram_mb=needs.gpu_ram_mb,
        min_reliability=rent.min_reliability,
        max_dph=rent.max_dph,
        regions=rent.regions,
        budget_s=settings.budget_s,
        expected_s=EXPECTED_SHARE * settings.budget_s,
        lifetime_s=lifetime_s(settings),
    )


def lifetime_s(settings: Settings) -> float:
    """After so long a machine ends itself, whatever happens."""
    whole_s = settings.budget_s + destroy_budget_s(settings.num_stages) + LIFETIME_SLACK_S
    return settings.lifetime_s or min(MAX_LIFETIME_S, whole_s)


async def _credit(api: VastApi) -> float | None:
    """What the account holds, in dollars; None for a key that may not read it."""
    try:
        return (await api.user()).credit
    except (AuthRefused, Refused, BadReply):
        return None


async def _settle(api: VastApi, progress: Progress) -> None:
    """End what dead runs of this machine left; say what else carries our name, and what could not be confirmed."""
    settled = await settle(api, state_dir(), say=progress.say)
    if settled.outcome.ended or settled.outcome.leftovers or settled.outcome.warnings or settled.untouched:
        for line in settled_lines(settled):
            progress.say(line)


async def _agree(plan: Plan, rent: RentSettings, progress: Progress) -> None:
    """Show the plan; on a terminal, ask. Raises RentError for anything but a yes."""
    for line in plan.to_lines()[: len(plan.chosen) + 1]:
        progress.say(line)
    if rent.confirm == "yes" or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"ppsmoke: rent this, for {plan.at_most} at most? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = await _line_of_stdin()
    if answer.strip().lower() not in ("y", "yes"):
        raise RentError("not confirmed; nothing was rented", phase="rent", hint="answer y, or give --yes")


async def _line_of_stdin() -> str:
    """A line of the terminal; the loop goes on meanwhile, so that a signal still ends it all. "" at its end."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        if not line.done():
            line.set_result(os.read(0, 1000).decode(errors="replace"))

    loop.add_reader(0, read)
    try:
        return await line
    finally:
        loop.remove_reader(0)


def _url() -> str:
    """VAST_URL, as we use it; "" where it is not set. Raises UsageError for what the key must not be sent to."""
    url = os.environ.get(URL_VARIABLE, "")
    return check_base_url(url) if url else ""
