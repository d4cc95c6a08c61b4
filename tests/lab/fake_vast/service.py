"""The service without its sockets: a request in, a reply out. Routing, keys, rate limits, faults and hooks."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tests.lab.fake_vast import replies
from tests.lab.fake_vast.account import Account
from tests.lab.fake_vast.clock import Clock
from tests.lab.fake_vast.faults import FaultBox
from tests.lab.fake_vast.limits import DOCUMENTED_S, Limiter
from tests.lab.fake_vast.replies import Reply, Request
from tests.lab.fake_vast.routes import Call, Results, Verbs

_ID = r"(\d+)"
# method, path, route (for limits and faults), the method of Verbs that answers
ROUTES = (
    ("POST", r"/api/v0/bundles/", "search", "search_post"),
    ("GET", r"/api/v0/bundles/", "search", "search_get"),
    ("PUT", rf"/api/v0/asks/{_ID}/", "create", "create"),
    ("GET", r"/api/v1/instances/", "list", "list_v1"),
    ("GET", r"/api/v0/instances/", "list", "list_v0"),
    ("GET", r"/api/v0/instances/filters/", "user", "filters"),
    ("GET", rf"/api/v0/instances/{_ID}/", "show", "show"),
    ("PUT", rf"/api/v0/instances/{_ID}/", "manage", "manage"),
    ("DELETE", rf"/api/v0/instances/{_ID}/", "destroy", "destroy"),
    ("DELETE", r"/api/v0/instances/", "destroy", "destroy_many"),
    ("PUT", rf"/api/v0/instances/request_logs/{_ID}/", "logs", "logs"),
    ("PUT", rf"/api/v0/instances/command/{_ID}/", "execute", "execute"),
    ("GET", r"/api/v0/users/current/?", "user", "user"),
    ("GET", r"/api/v0/gpu_names/unique/", "user", "gpu_names"),
)
_KEYLESS = {"gpu_names"}
_OWN_INSTANCE = {"show", "manage", "destroy"}  # what an instance-scoped key may do, to its own instance alone

Hook = Callable[[Request, int | None], None]


class Service:
    """The fake API. Thread-safe: effects happen under one lock, hooks and faults outside it."""

    def __init__(
        self,
        account: Account,
        clock: Clock,
        *,
        key: str,
        faults: FaultBox,
        logs_of: Callable[[int], bytes],
        enforce_limits: bool,
        limits_s: Mapping[str, float] = DOCUMENTED_S,
        bad_key_status: int = 404,
        bulk: bool = False,
    ) -> None:
        self.account, self.clock, self.faults = account, clock, faults
        self.lock = threading.RLock()
        self.requests: list[Request] = []
        self.leaks: Counter[str] = Counter()
        self.elsewhere = ""  # URL of the second listener: where redirects and result_urls point
        self.limiter = Limiter(limits_s)
        self.results = Results()
        self._verbs = Verbs(account, self.results, faults, logs_of=logs_of, bulk=bulk)
        self._key, self._enforce, self._bad_key_status = key, enforce_limits, bad_key_status
        self._hooks: list[tuple[str, str, Hook]] = []

    def on(self, route: str, moment: str, hook: Hook) -> None:
        """Call hook(request, instance id or None) at the "arrival" of a call, "before" it has its effect (a fault may
        keep it from that) or "after" it, before the reply."""
        self._hooks.append((route, moment, hook))

    def handle(self, request: Request) -> Reply:
        """The reply to one call, its effect done (or not, as a fault has it)."""
        with self.lock:
            self.requests.append(request)
        found = self._find(request.method, request.path.partition("?")[0])
        if isinstance(found, Reply):
            return found
        route, verb, instance_id = found
        if "api_key" in request.query:
            self.leaks["key_in_url"] += 1
            return replies.failure(400, "invalid_args", "a key in the URL lands in logs")
        if verb not in _KEYLESS and not self._may(request.key, route, instance_id):
            return replies.bad_key(self._bad_key_status)
        if (refused := self._paced(request, route)) is not None:
            return refused
        self._fire(route, "arrival", request, instance_id)
        kind = self.faults.take(route)
        if kind is not None and (broken := replies.without_effect(kind, elsewhere=self.elsewhere)) is not None:
            return broken
        self._fire(route, "before", request, instance_id)
        with self.lock:
            now = self.clock.now()
            self.account.settle(now)
            call = Call(request, instance_id, now, kind, self.elsewhere)
            reply = getattr(self._verbs, verb)(call)
        self._fire(route, "after", request, call.made or instance_id)
        return replies.after_effect(kind, reply)

    def handle_elsewhere(self, request: Request) -> Reply:
        """The second listener: log files, and the target of redirects. A key that arrives here has leaked."""
        if request.key is not None:
            self.leaks["authorization_leaked"] += 1
        kind = self.faults.take("result")
        if kind is not None and (broken := replies.without_effect(kind, elsewhere=self.elsewhere)) is not None:
            return broken
        path = request.path.partition("?")[0]
        if path == "/elsewhere":
            return replies.as_json({"success": True})
        with self.lock:
            return replies.after_effect(kind, self.results.fetch(path))

    def ledger(self) -> dict[str, Any]:
        """What GET /_lab/ledger answers."""
        with self.lock:
            now = self.clock.now()
            self.account.settle(now)
            live, ended = self.account.rentals(now)
            return {
                "live": live,
                "ended": ended,
                "decoys_touched": self.account.decoys_touched,
                "requests": [{"method": one.method, "path": one.path, "t": one.t} for one in self.requests],
                "too_early": dict(self.limiter.violations),
                "leaks": dict(self.leaks),
                "now": now,
            }

    def _find(self, method: str, path: str) -> tuple[str, str, int | None] | Reply:
        for wanted, pattern, route, verb in ROUTES:
            if method == wanted and (match := re.fullmatch(pattern, path)):
                return route, verb, int(match[1]) if match.groups() else None
        if any(re.fullmatch(pattern, path + "/") for _, pattern, _, _ in ROUTES):
            return Reply(status=308, headers={"Location": path + "/"}, content_type="text/html")
        return replies.not_found_page()

    def _may(self, key: str | None, route: str, instance_id: int | None) -> bool:
        if key == self._key:
            return True
        instance = self.account.instances.get(instance_id or -1)
        return instance is not None and route in _OWN_INSTANCE and key == instance.api_key

    def _paced(self, request: Request, route: str) -> Reply | None:
        with self.lock:
            threshold_s = self.limiter.too_early(route, request.key or "", self.clock.now())
        return replies.too_often(threshold_s) if self._enforce and threshold_s is not None else None

    def _fire(self, route: str, moment: str, request: Request, instance_id: int | None) -> None:
        for hooked, when, hook in self._hooks:
            if hooked in (route, "any") and when == moment:
                hook(request, instance_id)
