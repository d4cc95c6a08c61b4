"""The vast.ai client: a method per endpoint, paced, retried where repeating is safe, every reply checked.

Blocking exchanges run in a daemon thread each, so that no stuck name server can hold up a loop or the exit. A caller
may be cancelled in any method: a read or a DELETE under way is then left behind (harmless: both may be repeated).
`create` alone must not be left: it neither waits for its turn nor retries, and whoever calls it does so inside
`to_the_end` (rent/create.py), so that its outcome is always written down.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ppsmoke.rent import shapes
from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.clock import Clock, RealClock
from ppsmoke.rent.pacer import SPACING_S, Pacer, Route, backoff_s
from ppsmoke.rent.shapes import Instance, Listing, Offer, User
from ppsmoke.rent.vast_http import DEFAULT_URL, NoReply, Reply, Transport, UrllibTransport
from ppsmoke.rent.verdicts import (
    Accepted,
    AuthRefused,
    BadReply,
    CreateOutcome,
    NoTurn,
    OfferLost,
    QuotaSpent,
    Refused,
    TooOften,
    Unclear,
    Unreachable,
    VastError,
    is_already_gone,
    judge,
    judge_create,
    one_line,
)

T = TypeVar("T")
CHECK_NETWORK = "check the network, and VAST_URL where it is set"
EXCHANGE_S = 20.0  # one request and its answer
CREATE_EXCHANGE_S = 30.0  # a create may take its time; cutting it short makes its outcome unclear
TELL_WAIT_S = 5.0  # a wait that the service imposed, or an answer that does not come, is told from this long on
TELL_AGAIN_S = 5.0  # several calls that fail in the same way are told of once in so long
THREAD_GRACE_S = 5.0  # what urllib cannot be stopped in (a name server, a TLS handshake) gets this much longer
CALL_S = 60.0  # a call with its turns and retries, unless the caller says otherwise
PATIENCE_S = 15.0  # the same where somebody sits and waits for nothing but this answer
PAGE_ROWS = 25  # the API's maximum for a page of instances
MAX_PAGES = 400  # 10,000 instances; an endless chain of tokens is a fault
OFFERS_PER_REPLY = 64  # the API's cap of late 2026, whatever limit is asked for
SEARCH_LIMIT = 1000  # earlier that year the limit was how many offers were looked at, so a small one hides most
LOG_POLL_S, LOG_WAIT_S, MAX_LOG_BYTES = 0.7, 12.0, 256 << 10  # the host uploads for some seconds after the request


@dataclass(frozen=True)
class Usage:
    """What this client asked for, per route."""

    calls: Mapping[Route, int]
    too_often: int  # 429 answers


class VastApi:
    """One account at one address, for one event loop. `spacing_s`: the least seconds between calls, by route.
    `patience_s`: the most that any one request may take with its turns and retries, whatever its caller would allow.
    `say` gets a line for what keeps somebody waiting."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Clock | None = None,
        spacing_s: Mapping[Route, float] = SPACING_S,
        rng: random.Random | None = None,
        host: str = "console.vast.ai",
        key_fingerprint: str = "",
        patience_s: float = float("inf"),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._transport = transport
        self.clock: Clock = clock or RealClock()
        self._pacer = Pacer(self.clock, spacing_s)
        self._rng = rng or random.Random()
        self.host = host
        self._key_fingerprint = key_fingerprint
        self._patience_s = patience_s
        self._say = say
        self._said_at: dict[str, float] = {}
        self._account: str | None = None
        self._calls = {route: 0 for route in Route}
        self._too_often = 0

    @classmethod
    def open(cls, key: ApiKey, url: str = "", **kwargs: Any) -> VastApi:
        """A client for the account of `key` at `url` (VAST_URL), by default the real service. Raises UsageError."""
        transport = UrllibTransport(url or DEFAULT_URL, key)
        host = urllib.parse.urlsplit(transport.base_url).netloc
        return cls(transport, host=host, key_fingerprint=key.fingerprint(), **kwargs)

    @property
    def usage(self) -> Usage:
        return Usage(dict(self._calls), self._too_often)

    async def user(self, *, within_s: float = CALL_S) -> User:
        """Whose key this is. Raises AuthRefused for a bad key."""
        return shapes.read_user(await self._call(Route.USER, "GET", "/api/v0/users/current/", within_s=within_s))

    async def account(self, *, within_s: float = CALL_S) -> str:
        """A name for the account, for the journal: an entry is only "gone" if its own account says so.

        A key without the permission to read the user (401 or 403) is known by its fingerprint; a key that is no key
        at all fails at the next call."""
        if self._account is None:
            try:
                self._account = f"{self.host}/{(await self.user(within_s=within_s)).id}"
            except (AuthRefused, Refused, BadReply):
                self._account = f"{self.host}/key-{self._key_fingerprint}"
        return self._account

    async def search(
        self,
        filters: Mapping[str, Any],
        *,
        max_pages: int = 2,
        enough: Callable[[list[Offer]], bool] = lambda offers: False,
        within_s: float = CALL_S,
    ) -> list[Offer]:
        """The offers that match, cheapest first; a full reply is followed by one that starts at its highest price,
        unless those so far are enough: searches are spaced far apart.

        Rows without an id, a machine, a GPU or a price are dropped. Raises QuotaSpent, or Unreachable, only if there
        is nothing to show: a failed later page ends the search with what the earlier ones held."""
        found: dict[int, Offer] = {}
        body = {**filters, "order": [["dph_total", "asc"]], "limit": SEARCH_LIMIT}
        until = self.clock.now() + within_s
        for _ in range(max_pages):
            try:
                reply = await self._call(Route.SEARCH, "POST", "/api/v0/bundles/", body, within_s=self._left(until))
            except (QuotaSpent, Unreachable):
                if not found:
                    raise
                break
            rows = reply.get("offers")
            if not isinstance(rows, list):
                raise BadReply("a search reply without `offers`", phase="rent")
            page = [offer for offer in map(shapes.read_offer, rows) if offer is not None]
            fresh = [offer for offer in page if offer.id not in found]
            found.update((offer.id, offer) for offer in fresh)
            if len(rows) != OFFERS_PER_REPLY or not fresh or enough(list(found.values())):
                break
            floor = max(offer.dph_total for offer in page)
            body["dph_total"] = {**filters.get("dph_total", {}), "gte": floor}
        return sorted(found.values(), key=lambda offer: (offer.dph_total, offer.id))

    async def create_turn(self) -> None:
        """Wait until a create may leave. Cancelled here, nothing was sent."""
        await self._pacer.turn(Route.CREATE)

    def create_refused_too_often(self, refusal: TooOften, attempt: int) -> None:
        """Make the next create wait after a 429."""
        self._too_often += 1
        wait_s = backoff_s(attempt, rng=self._rng, route=Route.CREATE, asked_for=refusal.wait_s)
        self._pacer.hold(Route.CREATE, wait_s)

    async def create(self, offer_id: int, body: Mapping[str, Any]) -> CreateOutcome:
        """One create call, sent once, in at most CREATE_EXCHANGE_S + THREAD_GRACE_S. Never raises for what the service
        or the network does. Not cancellation-safe by itself: see the module's docstring."""
        try:
            reply = await self._exchange(
                Route.CREATE, "PUT", f"/api/v0/asks/{offer_id}/", body, within_s=CREATE_EXCHANGE_S
            )
        except NoReply as error:
            return Unclear(str(error)) if error.sent else OfferLost(f"not sent: {error}")
        self._pacer.answered(Route.CREATE)
        return judge_create(reply)

    async def instance(self, instance_id: int, *, within_s: float = CALL_S) -> Instance | None:
        """One instance; None only if the API said so (`null`, or 404 no_such_instance). A new one may be None for
        seconds."""
        try:
            body = await self._call(Route.SHOW, "GET", f"/api/v0/instances/{instance_id}/?owner=me", within_s=within_s)
        except Refused as error:
            if is_already_gone(error):
                return None
            raise
        found = shapes.read_single(body)
        if found is not None and found.id != instance_id:
            raise BadReply(f"asked for instance {instance_id}, was told of {found.id}", phase="rent")
        return found

    async def instances(self, *, within_s: float = CALL_S, page_s: float = float("inf")) -> Listing:
        """Every instance of the account, over all pages, each in at most page_s. Raises rather than returning less."""
        found: dict[int, Instance] = {}
        until, served_at, token = self.clock.now() + within_s, None, None
        seen_tokens: set[str] = set()
        for page in range(1, MAX_PAGES + 1):
            reply = await self._reply(Route.LIST, "GET", _list_target(token), within_s=min(page_s, self._left(until)))
            rows, token = shapes.read_page(reply.json)
            found.update((row.id, row) for row in rows)
            served_at = reply.served_at if served_at is None else served_at
            if token is None:
                return Listing(tuple(found.values()), served_at, page)
            if token in seen_tokens:
                break
            seen_tokens.add(token)
        raise BadReply("a list of instances that does not end", phase="rent")

    async def destroy(self, instance_id: int, *, within_s: float = CALL_S) -> bool:
        """Ask for an instance's end: True if the API took it, False if it says there is none. Neither means gone:
        only a later read that succeeds and finds nothing does. Raises VastError."""
        try:
            await self._call(Route.DESTROY, "DELETE", f"/api/v0/instances/{instance_id}/", {}, within_s=within_s)
        except Refused as error:
            if is_already_gone(error):
                return False
            raise
        return True

    async def logs(self, instance_id: int, *, tail: int = 200, daemon: bool = False, within_s: float = 30.0) -> str:
        """The last lines of a container (`daemon`: of the host's daemon), at most MAX_LOG_BYTES. Raises VastError."""
        body = {"tail": str(tail), **({"daemon_logs": "true"} if daemon else {})}  # strings, as the official client
        until = self.clock.now() + within_s
        reply = await self._call(
            Route.LOGS, "PUT", f"/api/v0/instances/request_logs/{instance_id}/", body, within_s=within_s
        )
        url = reply.get("result_url")
        if not isinstance(url, str):
            raise BadReply("a log request without result_url", phase="rent")
        give_up = min(until, self.clock.now() + LOG_WAIT_S)
        while True:
            await self._pacer.turn(Route.RESULT)
            text = await self._fetch(url, within_s=max(1.0, self._left(give_up)))
            if text is not None:
                return text
            if self.clock.now() + LOG_POLL_S >= give_up:  # 403 and 404 until the host has uploaded it
                raise Unreachable(f"the logs of instance {instance_id} did not arrive", phase="rent")
            await self.clock.sleep(LOG_POLL_S)

    async def _fetch(self, url: str, *, within_s: float) -> str | None:
        self._calls[Route.RESULT] += 1
        within_s = min(within_s, EXCHANGE_S)
        try:
            reply = await _in_thread(
                lambda: self._transport.fetch(url, within_s=within_s, max_bytes=MAX_LOG_BYTES),
                within_s=within_s + THREAD_GRACE_S,
            )
        except NoReply:
            return None
        return reply.body.decode("utf-8", "replace") if reply.status == 200 else None

    async def _call(
        self, route: Route, method: str, target: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> dict[str, Any]:
        return (await self._reply(route, method, target, body, within_s=within_s)).json

    async def _reply(
        self, route: Route, method: str, target: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> Reply:
        """A call that may be repeated, until it is answered or within_s is spent. The reply holds a JSON object."""
        began, within_s = self.clock.now(), min(within_s, self._patience_s)
        until = began + within_s
        attempt, last = 0, ""
        while (self.clock.now() < until or attempt == 0) and await self._pacer.turn(route, until=until):
            attempt += 1
            try:
                reply = await self._exchange(route, method, target, body, within_s=min(EXCHANGE_S, self._left(until)))
                self._pacer.answered(route)
                verdict = judge(reply)
            except NoReply as error:
                verdict = Unclear(str(error))
            if isinstance(verdict, Accepted):
                return reply
            if isinstance(verdict, VastError):
                raise verdict
            last = one_line(f"HTTP 429: {verdict.text}" if isinstance(verdict, TooOften) else verdict.text)
            asked_for = verdict.wait_s if isinstance(verdict, TooOften) else None
            wait_s = backoff_s(attempt, rng=self._rng, route=route, asked_for=asked_for)
            if isinstance(verdict, TooOften):
                self._too_often += 1
                self._pacer.hold(route, wait_s)
            if self.clock.now() + wait_s >= until:
                break
            if wait_s >= TELL_WAIT_S or not isinstance(verdict, TooOften):
                self._tell(f"{route.value}: {last}", f"; again in {wait_s:.0f} s")
            await self.clock.sleep(wait_s)
        if not attempt:
            raise NoTurn(f"{route.value}: no turn in {within_s:.0f} s", phase="rent")
        tries = f"{attempt} attempt{'s' if attempt > 1 else ''} in {self.clock.now() - began:.0f} s"
        raise Unreachable(
            f"no usable answer from {self.host} ({route.value}): {last}; {tries}",
            phase="rent",
            hint="wait a minute, then start it again" if last.startswith("HTTP 429") else CHECK_NETWORK,
        )

    def _tell(self, what: str, more: str = "") -> None:
        if self.clock.now() - self._said_at.get(what, float("-inf")) >= TELL_AGAIN_S:
            self._said_at[what] = self.clock.now()
            self._say(what + more)

    async def _exchange(
        self, route: Route, method: str, target: str, body: Mapping[str, Any] | None, *, within_s: float
    ) -> Reply:
        self._calls[route] += 1
        data = None if body is None else json.dumps(body).encode()
        return await _in_thread(
            lambda: self._transport.exchange(method, target, body=data, within_s=within_s),
            within_s=within_s + THREAD_GRACE_S,
            on_silence=lambda: self._tell(f"{route.value}: no answer from {self.host} yet"),
        )

    def _left(self, until: float) -> float:
        return max(1.0, until - self.clock.now())  # a call that is allowed at all gets a second


def _list_target(token: str | None) -> str:
    """The list's path and query, in the official client's spelling."""
    query = {"select_filters": "{}", "order_by": json.dumps([{"col": "id", "dir": "asc"}]), "limit": PAGE_ROWS}
    if token is not None:
        query["after_token"] = token
    return "/api/v1/instances/?" + urllib.parse.urlencode(query)


async def _in_thread(work: Callable[[], T], *, within_s: float, on_silence: Callable[[], None] = lambda: None) -> T:
    """The result of blocking work in a daemon thread of its own; on_silence is called if it takes TELL_WAIT_S. Raises
    NoReply(sent=True) if it does not end in time: the thread is then left behind. An executor would make the
    interpreter wait for it at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # handed over whole: nothing may end in this thread alone
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            pass  # the loop was closed while we were out; nobody waits

    threading.Thread(target=run, name="vast.ai exchange", daemon=True).start()
    try:
        await asyncio.wait({future}, timeout=min(TELL_WAIT_S, within_s))
        if not future.done():
            on_silence()
            await asyncio.wait({future}, timeout=max(0.0, within_s - TELL_WAIT_S))
        if not future.done():
            raise NoReply(f"no answer within {within_s:g} s", sent=True)
        return future.result()
    finally:
        future.cancel()  # nothing if it is done; else nobody will look at what comes later
