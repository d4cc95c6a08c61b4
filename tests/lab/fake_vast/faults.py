"""What can go wrong, by name: the catalogue, and the box of faults that are armed now."""

from __future__ import annotations

import threading
from dataclasses import dataclass

ROUTES = {
    "search": "search offers",
    "create": "create an instance",
    "show": "read one instance",
    "list": "list instances",
    "destroy": "destroy an instance",
    "manage": "stop, start or label an instance",
    "logs": "ask for logs",
    "result": "fetch a result_url",
    "user": "read the account",
    "any": "whatever is called next",
}

# On every route. "-after": the call has had its effect, only the reply suffers.
REPLIES = {
    "reset": "connection reset, nothing done",
    "reset-after": "connection reset after the effect",
    "hang": "no reply until the caller gives up, nothing done",
    "hang-after": "no reply until the caller gives up, after the effect",
    "502": "502 with an HTML body, nothing done",
    "502-after": "502 with an HTML body, after the effect",
    "503": "503 with an HTML body, nothing done",
    "500": "500 server_error as JSON, nothing done",
    "500-after": "500 server_error as JSON, after the effect",
    "empty": "200 with an empty body, nothing done",
    "empty-after": "200 with an empty body, after the effect",
    "null": "200 with the body null, nothing done",
    "null-after": "200 with the body null, after the effect",
    "cut-after": "the true reply, cut in the middle of its body",
    "drip": "the true reply, a few bytes at a time",
    "html": "200 with an HTML page, nothing done",
    "wrong-type": "the true reply as text/plain",
    "huge": "200 with 48 MiB of JSON, nothing done",
    "redirect": "307 to another host, which records whether the key arrives there",
    "429": "429 in plain text",
    "429-json": "429 as JSON with retry_after",
    "429-detail": "429 as JSON with nothing but detail",
    "429-header": "429 in plain text with Retry-After: 1",
    "401": "401 auth_error",
    "404-auth": "404 auth_error (a revoked key)",
    "session-expired": "404, session expired",
    "two-factor": "401, two factor authentication needed",
    "403": "403, the key lacks the permission",
}

SPECIAL = {
    "search.quota": "429 search_quota_exceeded until UTC midnight",
    "search.sloppy": "one numeric filter of the request is not applied",
    "search.none": "no offers",
    "search.one": "one offer only",
    "create.race-400": "the ask is gone: 400 with no_such_ask in the text",
    "create.race-404": "the ask is gone: 404 invalid_args, not available",
    "create.race-410": "the ask is gone: 410 no_such_ask, no longer available",
    "create.not-yours": "403 invalid_args",
    "create.insufficient-credit": "400 insufficient_credit",
    "create.spend-rate-limit": "400 spend_rate_limit",
    "create.refused": "200 with success false and no contract",
    "create.empty-400": "400 with an empty body",
    "create.error-with-contract": "400 invalid_price, yet the instance exists, stopped, its storage billed",
    "create.invisible": "the instance is missing from the next reads and lists",
    "create.env-dropped": "accepted, but variables and ports are silently not applied",
    "list.moving": "rows vanish and appear between two pages",
    "list.empty-page": "an empty page that carries a token",
    "list.lag": "this list still lacks what the last 30 s created, and still shows what they destroyed",
    "list.v0-open": "GET /api/v0/instances/ still answers in the old shape",
    "destroy.ignored": "200, but the instance stays and bills",
    "destroy.slow": "200; readable as unloaded for ten more reads",
    "destroy.gone-400": "no_such_instance with status 400, destroyed all the same",
    "manage.queued": "a start is queued (200, success false) and fires later",
    "logs.never": "the result_url answers 403 for ever",
}

# Taken by the next instance that is created: how its machine behaves.
MACHINES = {
    "machine.cdi": "GPU injection fails: created, stopped, CDI text",
    "machine.oci": "the start command is no executable: created, stopped, OCI text",
    "machine.pull-denied": "the registry denies the image; stays loading",
    "machine.manifest-unknown": "the image's tag does not exist; stays created",
    "machine.registry-limit": "the registry's rate limit; stays loading",
    "machine.stuck-null": "never provisioned: actual_status stays null",
    "machine.stuck-loading": "loading for ever, nothing changes",
    "machine.slow-pull": "the pull takes 20 times as long, with signs of life",
    "machine.exited": "exited at once",
    "machine.no-ports": "running, ports null",
    "machine.port-missing": "running, the TCP port is not in the map",
    "machine.refusing": "running with ports, nobody behind them",
    "machine.udp-filtered": "running, UDP mapped but dropped",
    "machine.no-hairpin": "running, its peers cannot reach it through the public address",
    "machine.no-key": "running, CONTAINER_API_KEY is missing inside",
    "machine.late-running": "in service a minute before the status says running",
    "machine.false-exited": "shown as exited for 30 s while it is in service",
    "machine.offline": "offline 20 s after running",
    "machine.unknown": "unknown 20 s after running",
    "machine.outbid": "stopped by a higher bid 20 s after running",
    "machine.credit-stop": "stopped for lack of credit 20 s after running",
    "machine.vanish": "gone without our asking 20 s after running",
}


def catalogue() -> dict[str, str]:
    """Every fault's name and what it does, one line each."""
    replies = {f"{route}.{kind}": f"{what}: {text}" for route, what in ROUTES.items() for kind, text in REPLIES.items()}
    return replies | SPECIAL | MACHINES


@dataclass
class _Armed:
    route: str
    kind: str
    left: int | None  # None: for ever
    skip: int
    machine_id: int | None


class FaultBox:
    """Faults by route in the order in which they were armed; each call takes at most one."""

    def __init__(self) -> None:
        self._armed: list[_Armed] = []
        self._lock = threading.Lock()

    def arm(self, name: str, count: int | None = 1, *, skip: int = 0, machine_id: int | None = None) -> None:
        """The next `count` calls on the fault's route (None: all), after `skip` good ones; machine faults may name one
        machine. Raises ValueError for a name that is not in the catalogue."""
        if name not in catalogue():
            raise ValueError(f"no fault is called {name!r}; --list-faults names them all")
        route, _, kind = name.partition(".")
        with self._lock:
            self._armed.append(_Armed(route, kind, count, skip, machine_id))

    def disarm(self, name: str) -> None:
        """Take back every armed fault of this name."""
        route, _, kind = name.partition(".")
        with self._lock:
            self._armed = [fault for fault in self._armed if (fault.route, fault.kind) != (route, kind)]

    def take(self, route: str, *, machine_id: int | None = None) -> str | None:
        """The kind of fault that hits this call, or None."""
        with self._lock:
            for fault in self._armed:
                if fault.route not in ((route,) if route == "machine" else (route, "any")):
                    continue
                if fault.machine_id is not None and fault.machine_id != machine_id:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.left is None:
                    return fault.kind
                if fault.left > 0:
                    fault.left -= 1
                    return fault.kind
            return None

    def unused(self) -> list[str]:
        """Names of armed faults that have not (fully) struck; a test may insist on none."""
        with self._lock:
            return [f"{fault.route}.{fault.kind}" for fault in self._armed if fault.left]


def parse_fault(text: str) -> tuple[str, int | None, int]:
    """NAME[:COUNT[:SKIP]], COUNT a number or "always" -> (name, count, skip). Raises ValueError."""
    name, _, rest = text.partition(":")
    count_text, _, skip_text = rest.partition(":")
    if name not in catalogue():
        raise ValueError(f"no fault is called {name!r}; --list-faults names them all")
    try:
        count = None if count_text == "always" else int(count_text or "1")
        return name, count, int(skip_text or "0")
    except ValueError:
        raise ValueError(f"{text!r} is not NAME[:COUNT[:SKIP]]") from None
