"""A small run that rents one instance and ends it, to be killed on the way. Arguments: url, state folder, with|without
(a reaper). The key is the first line of stdin. Prints the reaper's pid (0: none) and then what came of it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.clock import RealClock
from ppsmoke.rent.create import Creator, Machine, Rented
from ppsmoke.rent.destroy import end_run
from ppsmoke.rent.ledger import Journal
from ppsmoke.rent.reaper import Reaper
from ppsmoke.rent.vast_api import VastApi

RUN_ID = "5eed0001"


async def main(url: str, folder: Path, net: str) -> None:
    key = ApiKey(sys.stdin.readline())
    api = VastApi.open(key, url, clock=RealClock.from_environment(os.environ))
    account = await api.account()
    journal = Journal.start(folder, RUN_ID, at=api.clock.wall())
    reaper = Reaper.start(journal, key=key, url=url, account=account) if net == "with" else None
    print(reaper.pid if reaper else 0, flush=True)
    offers = await api.search({"rentable": {"eq": True}}, max_pages=1)
    creator = Creator(api, journal, run_id=RUN_ID, account=account, expires_at=api.clock.wall() + 600)
    machine = Machine(image="python:3.12-slim", disk_gb=10)
    rented = await creator.create(offers[10], lambda label: machine, stage=0)
    outcome = await end_run(api, journal, account=account, within_s=90.0)
    journal.close()
    if reaper is not None:
        reaper.dismiss()
    print(isinstance(rented, Rented), len(outcome.ended), len(outcome.leftovers), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
