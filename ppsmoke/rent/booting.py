"""From a running container to the start of its node: our code is pushed, pip is waited for, the account is watched."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from ppsmoke.errors import DeadlineExceeded
from ppsmoke.rent.fleet import StageSpec
from ppsmoke.rent.push import BootFailed, BootStatus, PushReport, build_payload, push
from ppsmoke.rent.rentals import Rental
from ppsmoke.rent.shipyard import HostFailed, Shipyard
from ppsmoke.rent.starting import Bad, Starting, Up
from ppsmoke.waiting import cancel_and_reap

BOOT_BUDGET_S = 120.0  # design, phase boot: from running to the node's start
NOBODY_S = 60.0  # running, and nobody proves the stage's secret behind the mapped port: a misforwarded router
STILL_S = 20.0  # a boot that goes on is said to so often
FRESH_S = 15.0  # a boot that told of itself so lately is alive, whatever the account shows


class Boot:
    """One container's boot. starting: what has been seen of its instance so far."""

    def __init__(self, yard: Shipyard, rental: Rental, up: Up, starting: Starting) -> None:
        self._yard = yard
        self._rental = rental
        self._up = up
        self._starting = starting
        self._clock = yard.api.clock
        self._began = self._said_at = self._clock.now()
        self._status: BootStatus | None = None
        self._heard_at: float | None = None

    async def run(self, spec: StageSpec) -> PushReport:
        """Until the node is being started. Raises HostFailed; DeadlineExceeded where the run's own time is over."""
        deadline = self._yard.deadline.capped(BOOT_BUDGET_S, phase="boot")
        payload = build_payload(spec.certificates_json(), self._yard.code)
        up, stage = self._up, spec.stage
        pushing = asyncio.ensure_future(
            push(
                up.address,
                up.tcp_port,
                spec.boot_secret,
                payload,
                deadline=deadline,
                stage=stage,
                on_status=self._take,
            )
        )
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({pushing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not pushing.done():
                watching.result()  # it ends by raising alone
            return pushing.result()
        except BootFailed as error:
            another = error.kind in ("pip", "proof")  # a node that ends at once would do so anywhere
            told = {"hint": error.hint, "detail": error.detail}
            raise HostFailed(error.cause, phase="boot", another=another, **told) from error
        except DeadlineExceeded as error:
            if self._yard.deadline.remaining() <= 0:
                raise
            raise HostFailed(error.cause, phase="boot", hint=error.hint, detail=error.detail) from error
        finally:
            await cancel_and_reap(pushing, watching)

    async def _watch(self) -> NoReturn:
        """Raises HostFailed for a machine that goes away meanwhile, or behind whose port nobody is."""
        where = f"{self._up.address}:{self._up.tcp_port}"
        while True:
            looked = await self._yard.view.next_look()
            now = self._clock.now()
            if self._heard_at is None:
                self._say_still(f"nobody of ours answers at {where} yet")
            if self._heard_at is None and now - self._began >= NOBODY_S:
                raise HostFailed(f"running, but nobody of ours answers at {where} for {NOBODY_S:.0f} s", phase="boot")
            if not looked:
                continue
            self._yard.look_at(self._rental)
            verdict = self._starting.see(self._yard.view.of(self._rental.instance_id), now)
            alive = self._heard_at is not None and now - self._heard_at < FRESH_S
            if isinstance(verdict, Bad) and not alive:
                raise HostFailed(verdict.why, phase="boot", another=verdict.another == "may help")

    def _take(self, status: BootStatus) -> None:
        """A record that the boot told of itself; a person is told what is new."""
        before, self._status, self._heard_at = self._status, status, self._clock.now()
        say, stage = self._yard.progress.say, self._rental.stage
        if before is None:
            say(f"it has our code; Python {status.python or '?'}, its dead-man is {status.dead_man}", stage=stage)
        if status.pip_try > (before.pip_try if before else 1):
            say(f"pip failed, try {status.pip_try}", stage=stage)
        if status.warning and (before is None or before.warning != status.warning):
            say(f"warning: {status.warning}", stage=stage)
        self._yard.progress.detail(f"stage {stage}: boot: {status.state}: {status.last_line}")
        self._say_still(f"still installing: {status.last_line}")

    def _say_still(self, text: str) -> None:
        now = self._clock.now()
        if now - self._said_at >= STILL_S:
            self._said_at = now
            self._yard.progress.say(f"{text}, {now - self._began:.0f} s after it ran", stage=self._rental.stage)
