"""One look at the account for all who wait: a single list call a pass, whatever the number of machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from ppsmoke.cluster.changes import Signal
from ppsmoke.rent.shapes import Instance, Listing
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.verdicts import AuthRefused, VastError

LOOK_S = 30.0  # for one look, its pages and retries


class AccountView:
    """The latest complete list; a look that failed changes nothing and counts all the same. on_look is called with
    what each one that did not fail has shown."""

    def __init__(self, api: VastApi, *, say: Callable[[str], None], on_look: Callable[[Listing], None]) -> None:
        self._api = api
        self._say = say
        self._on_look = on_look
        self._looked = Signal()
        self._rows: Mapping[int, Instance] | None = None

    async def keep_looking(self, period_s: Callable[[], float]) -> NoReturn:
        """Look for ever, period_s() apart. Raises AuthRefused: then nothing will be seen any more."""
        while True:
            began = self._api.clock.now()
            try:
                listing = await self._api.instances(within_s=LOOK_S)
                self._rows = {instance.id: instance for instance in listing.instances}
                self._on_look(listing)
            except AuthRefused as error:
                self._say(f"the account's instances can no longer be listed: {error.cause}")
                raise
            except VastError as error:
                self._rows = None
                self._say(f"could not list the account's instances: {error.cause}")
            self._looked.notify()
            await self._api.clock.sleep(max(0.0, began + period_s() - self._api.clock.now()))

    async def next_look(self) -> bool:
        """Wait for the next look; did it show anything? False: it failed, and proves nothing."""
        await self._looked.wait()
        return self._rows is not None

    def of(self, instance_id: int) -> Instance | None:
        """What the latest look showed of it."""
        return (self._rows or {}).get(instance_id)
