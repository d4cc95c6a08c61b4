"""What the renting tests share: a clock that client and fake live by, a client of a fake, a scripted service."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ppsmoke.rent.api_key import ApiKey
from ppsmoke.rent.vast_api import VastApi
from ppsmoke.rent.vast_http import NoReply, Reply, Transport, UrllibTransport
from tests.lab.fake_vast import FakeVast

T = TypeVar("T")
KEY = "test-key"


class FakeTime:
    """A client's clock that jumps to the next sleeper once nothing else goes on: no task is ready, no exchange is out.
    The fake's clock, if there is one, jumps with it."""

    def __init__(self, fake: FakeVast | None = None, *, wall: float = 1_800_000_000.0) -> None:
        self._fake = fake
        self._began = wall if fake is None else fake.clock.now()
        self._own = wall
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._pump: asyncio.Task[None] | None = None
        self.exchanges = 0  # under way now

    def wall(self) -> float:
        return self._own if self._fake is None else self._fake.clock.now()

    def now(self) -> float:
        return self.wall() - self._began

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        until = self.wall() + max(seconds, 1e-6)  # less is lost in the rounding of an epoch
        heapq.heappush(self._sleepers, (until, next(self._order), future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._run())
        await future

    async def _run(self) -> None:
        while self._sleepers:
            for _ in range(5):  # whatever is ready runs first, and what that makes ready
                await asyncio.sleep(0)
            if self.exchanges:
                await asyncio.sleep(0.0005)
                continue
            until, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                self._jump(max(0.0, until - self.wall()))
                future.set_result(None)

    def _jump(self, seconds: float) -> None:
        if self._fake is None:
            self._own += seconds
        else:
            self._fake.clock.advance(seconds)


class _Counted:
    """A transport whose exchanges hold up a FakeTime."""

    def __init__(self, inner: Transport, time: FakeTime) -> None:
        self._inner, self._time = inner, time
        self._lock = threading.Lock()

    def exchange(self, *args: Any, **kwargs: Any) -> Reply:
        with self._under_way():
            return self._inner.exchange(*args, **kwargs)

    def fetch(self, *args: Any, **kwargs: Any) -> Reply:
        with self._under_way():
            return self._inner.fetch(*args, **kwargs)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        with self._lock:
            self._time.exchanges += 1
        try:
            yield
        finally:
            with self._lock:
                self._time.exchanges -= 1


def client(fake: FakeVast, key: str = KEY) -> VastApi:
    """Our client of this fake, on its time, at the real spacings."""
    time, api_key = FakeTime(fake), ApiKey(key)
    transport = _Counted(UrllibTransport(fake.url, api_key), time)
    host = fake.url.removeprefix("http://")
    return VastApi(transport, clock=time, host=host, key_fingerprint=api_key.fingerprint())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def reply(status: int, body: Any = "", **headers: str) -> Reply:
    """A reply as it came over the wire: text as it is, anything else as JSON."""
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return Reply(status, data, {name.replace("_", "-"): value for name, value in headers.items()})


class Scripted:
    """A transport that answers from a list and remembers what it was asked."""

    def __init__(self, answers: Iterable[Reply | NoReply]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str, Any]] = []

    def exchange(self, method: str, target: str, *, body: bytes | None, within_s: float) -> Reply:
        self.asked.append((method, target, None if body is None else json.loads(body)))
        answer = self._answers.pop(0)
        if isinstance(answer, NoReply):
            raise answer
        return answer

    def fetch(self, url: str, *, within_s: float, max_bytes: int) -> Reply:
        self.asked.append(("FETCH", url, None))
        answer = self._answers.pop(0)
        if isinstance(answer, NoReply):
            raise answer
        return answer


def scripted(*answers: Reply | NoReply) -> tuple[VastApi, Scripted]:
    """A client whose service says just this."""
    transport = Scripted(answers)
    return VastApi(transport, clock=FakeTime(), host="lab", key_fingerprint="00000000"), transport
