"""Keeping links: race the ways to a peer, again after a pause with jitter; dial afresh beside a link that is silent,
and look for a better path than it has."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ppsmoke.cluster.changes import Signal
from ppsmoke.cluster.handshake import HelloRefused, KeyRefused, LinkKind
from ppsmoke.cluster.link import DuplicateLink, Link
from ppsmoke.cluster.link_timing import LinkTiming
from ppsmoke.cluster.paths import Attempt, better_link, first_link
from ppsmoke.cluster.peer import Peer
from ppsmoke.errors import LinkError
from ppsmoke.waiting import cancel_and_reap

ACCEPTOR_PAUSE_S = 1.0  # whoever dialled the lost link is first to dial it again
YOUNG_S = 2.0  # a link that ended before is no reason to dial again at once
BESIDE_EVERY_S = (2.0, 3.0)  # while a link is silent, another one is dialled so often, at random,
BESIDE_AT_ONCE = 2  # while no more are under way: a frozen host's kernel accepts them all, and nobody there answers
KEY_REFUSALS = 3  # a hang-up may be chance once or twice


class Dialler:
    """One task per peer that is to be kept; all of them end with close().

    open_link(peer, attempt): the link that this attempt gives, or LinkError. relays(peer): who could relay, the best
    first. learn(peer): bring what is known of its candidates up to date.
    """

    def __init__(
        self,
        open_link: Callable[[Peer, Attempt], Awaitable[Link]],
        relays: Callable[[Peer], list[str]],
        learn: Callable[[Peer], None],
        changed: Signal,
        timing: LinkTiming,
        rng: random.Random,
    ) -> None:
        self._open = open_link
        self._relays = relays
        self._learn = learn
        self._changed = changed
        self._timing = timing
        self._rng = rng
        self._now = asyncio.get_running_loop().time
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def keep(self, peer: Peer) -> None:
        """Have a link to this peer whenever it can be had, the best that can. Asking twice is the same as once, after
        close() it is nothing."""
        if self._closed:
            return
        task = self._tasks.get(peer.node_id)
        if task is None:
            peer.sought()
        if task is None or task.done():
            task = asyncio.ensure_future(self._keep(peer))
            task.set_name(f"keep {peer.name}")
            self._tasks[peer.node_id] = task

    async def close(self) -> None:
        self._closed = True
        await cancel_and_reap(*self._tasks.values())

    async def _keep(self, peer: Peer) -> None:
        failures = key_refusals = 0
        pause_s = 0.0
        while not peer.superseded and peer.refusal is None:
            if peer.link is not None:
                last = await self._while_linked(peer)
                if self._now() - last.up_at < YOUNG_S:  # the peer may have hung up on purpose
                    failures, pause_s = failures + 1, self._pause_s(failures)
                else:
                    failures, pause_s = 0, 0.0 if last.dialled else ACCEPTOR_PAUSE_S
                continue
            if peer.left is not None or not self._ways(peer):
                await self._changed.wait()
                continue
            if pause_s > 0 and await self._changed_meanwhile(peer, pause_s):
                pause_s = 0.0
                continue
            try:
                await self._connect(peer)
                key_refusals = 0
            except LinkError as error:
                peer.last_error = error
                key_refusals = key_refusals + 1 if isinstance(error, KeyRefused) else 0
                if isinstance(error, HelloRefused) or key_refusals >= KEY_REFUSALS:
                    peer.refusal = error
                self._changed.notify()
            failures += 1
            pause_s = self._pause_s(failures)

    def _pause_s(self, failures: int) -> float:
        most_s = min(self._timing.redial_most_s, self._timing.redial_s * 2 ** min(failures, 10))
        return self._rng.uniform(0, most_s)

    def _ways(self, peer: Peer) -> tuple[object, ...]:
        """What could be tried; when it changes, there is no reason to wait any longer."""
        return (*peer.candidates_in_order(), *self._relays(peer), *([peer.news] if self._relays(peer) else ()))

    async def _changed_meanwhile(self, peer: Peer, pause_s: float) -> bool:
        """Wait, but not longer than until the peer has dialled us, is no longer wanted or can be reached otherwise."""
        until, ways = self._now() + pause_s, self._ways(peer)
        while (left_s := until - self._now()) > 0:
            await self._changed.wait(left_s)
            if peer.link is not None or peer.left is not None or peer.superseded or self._ways(peer) != ways:
                return True
        return False

    async def _connect(self, peer: Peer) -> None:
        """Race all ways to it; what becomes known meanwhile joins the race. Raises LinkError when all have failed."""
        began, tried, errors = self._now(), set(), []
        races: set[asyncio.Future[None]] = set()
        try:
            while True:
                self._learn(peer)
                fresh = []
                for attempt in first_link(peer.candidates_in_order(), self._relays(peer)):
                    key = (attempt.candidate, attempt.relay, peer.news if attempt.relay else 0)
                    if key not in tried:
                        tried.add(key)
                        after_s = attempt.after_s - (self._now() - began)
                        fresh.append(replace(attempt, after_s=max(0.0, after_s)))
                if fresh:
                    races.add(asyncio.ensure_future(self._race(peer, fresh)))
                if not races:
                    raise most_telling(errors)
                looking = asyncio.ensure_future(self._changed.wait())
                try:
                    done, _ = await asyncio.wait({*races, looking}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancel_and_reap(looking)
                for race in done & races:
                    races.discard(race)
                    if (error := race.exception()) is None:
                        return
                    if not isinstance(error, LinkError):
                        raise error
                    errors.append(error)
                if peer.link is not None or peer.superseded:
                    return  # it has dialled us
        finally:
            await cancel_and_reap(*races)

    async def _while_linked(self, peer: Peer) -> Link:
        """Until the peer has no link: try for a better one than it has, in rounds that nothing needs to wait for. The
        last link that it had."""
        last = peer.link
        while (link := peer.link) is not None and not peer.superseded:
            last = link
            if link.silent:
                await self._beside(peer, link)
                continue
            due_in_s = peer.upgrades.due_in_s(self._now())
            if due_in_s is None or due_in_s > 0:
                await self._changed.wait(due_in_s)
                continue
            self._learn(peer)
            punches = peer.upgrades.begin(self._now())
            attempts = better_link(peer.candidates_in_order(), relay=link.via if punches and link.serves else None)
            if attempts:
                await self._improve(peer, link, attempts)
        return last

    async def _improve(self, peer: Peer, link: Link, attempts: Sequence[Attempt]) -> None:
        """One round. It ends early when the link that it would replace is gone: then any path is better than none."""
        race = asyncio.ensure_future(self._race(peer, attempts))
        race.set_name(f"better path to {peer.name}")
        race.add_done_callback(lambda _: self._changed.notify())
        try:
            while not race.done() and peer.link is link and not link.silent:
                await self._changed.wait()
            if race.done() and (error := race.exception()) is not None:
                if not isinstance(error, LinkError):
                    raise error
                peer.upgrades.note = peer.upgrades.note or error.cause
        finally:
            await cancel_and_reap(race)

    async def _beside(self, peer: Peer, link: Link) -> None:
        """Dial afresh beside a silent link, until it speaks again, ends or is replaced. In an outage TCP doubles its
        pauses: when the network is back, a new connection gets through at once, the old one after as long again."""
        races: set[asyncio.Future[None]] = set()
        next_at = self._now() + (0.0 if link.dialled else ACCEPTOR_PAUSE_S)
        try:
            while peer.link is link and not peer.superseded and (link.silent or races):
                is_free = link.silent and len(races) < BESIDE_AT_ONCE
                if is_free and self._now() >= next_at:
                    next_at = self._now() + self._rng.uniform(*BESIDE_EVERY_S)
                    self._learn(peer)
                    relays = self._relays(peer) if link.kind is not LinkKind.DIRECT and not races else []
                    attempts = first_link(peer.candidates_in_order(), relays)
                    race = asyncio.ensure_future(self._race(peer, attempts))
                    race.set_name(f"beside the silent link to {peer.name}")
                    race.add_done_callback(lambda _: self._changed.notify())
                    races.add(race)
                await self._changed.wait(max(0.0, next_at - self._now()) if is_free else None)
                for race in [race for race in races if race.done()]:
                    races.discard(race)
                    if (error := race.exception()) is not None and not isinstance(error, LinkError):
                        raise error
        finally:
            await cancel_and_reap(*races)

    async def _race(self, peer: Peer, attempts: Sequence[Attempt]) -> None:
        try:
            await first_of([(one.after_s, lambda one=one: self._open(peer, one)) for one in attempts])
        except DuplicateLink:
            if peer.link is None:  # the one the peer keeps is about to be up here, or about to be found dead there
                raise


async def first_of(attempts: Sequence[tuple[float, Callable[[], Awaitable[Link]]]]) -> Link:
    """The first link that comes up (RFC 8305's race). Each attempt starts after its time from the race's start, or as
    soon as all before it have failed. The rest are cancelled. If all fail, raises the error that says most."""
    waiting, running, errors = deque(attempts), set(), []
    now = asyncio.get_running_loop().time
    began = now()
    try:
        while waiting or running:
            while waiting and (not running or waiting[0][0] <= now() - began):
                running.add(asyncio.ensure_future(waiting.popleft()[1]()))
            timeout_s = max(0.0, waiting[0][0] - (now() - began)) if waiting else None
            done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            failed = [error for task in done if (error := task.exception()) is not None]  # all are asked: none is lost
            for error in failed:
                if not isinstance(error, LinkError):
                    raise error
            if len(failed) < len(done):
                return next(task.result() for task in done if task.exception() is None)
            errors += failed
        raise most_telling(errors)
    finally:
        await cancel_and_reap(*running)


def most_telling(errors: Sequence[LinkError]) -> LinkError:
    for kind in (HelloRefused, KeyRefused, DuplicateLink):
        for error in errors:
            if isinstance(error, kind):
                return error
    if len(errors) == 1:
        return errors[0]
    return LinkError("; ".join(dict.fromkeys(error.cause for error in errors)) or "nowhere to dial")
