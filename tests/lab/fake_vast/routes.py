"""What each route does: a call in, a reply out, the effect on the account between. Runs under the service's lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lab.fake_vast import order, pages
from tests.lab.fake_vast.account import INVISIBLE_READS, LINGER_READS, Account
from tests.lab.fake_vast.faults import FaultBox
from tests.lab.fake_vast.market import GPUS, Offer
from tests.lab.fake_vast.replies import Reply, Request, as_json, failure
from tests.lab.fake_vast.search import SearchRefused, search

RESTART_S, QUEUED_S = 10.0, 60.0  # a start after a stop; one that was queued for want of resources
SLOW_DESTROY_READS = 10
COMMANDS = ("ls", "rm", "du")
DENIALS = 2  # a result_url answers 403 so many times first


@dataclass
class Call:
    """One call on its way: `kind` is the fault that it took, `made` the instance that it created."""

    request: Request
    id: int | None
    now: float
    kind: str | None
    elsewhere: str
    made: int | None = None


class Results:
    """Files behind a result_url, each refused for its first fetches."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, list[bool]]] = {}

    def add(self, content: bytes, *, never: bool) -> str:
        """The path of a new file."""
        path = f"/bucket/{len(self._files):04d}.log"
        self._files[path] = (content, [True] * (10**6 if never else DENIALS))
        return path

    def fetch(self, path: str) -> Reply:
        if path not in self._files:
            return Reply(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>", content_type="application/xml")
        content, denials = self._files[path]
        if denials:
            denials.pop()
            return Reply(status=403, body=b"<Error><Code>AccessDenied</Code></Error>", content_type="application/xml")
        return Reply(body=content, content_type="text/plain")


class Verbs:
    """One method per route; each takes a Call and answers a Reply."""

    def __init__(
        self, account: Account, results: Results, faults: FaultBox, *, logs_of: Callable[[int], bytes], bulk: bool
    ) -> None:
        self._account, self._results, self._faults = account, results, faults
        self._logs_of, self._bulk = logs_of, bulk
        self._moving = False

    # Offers

    def search_post(self, call: Call) -> Reply:
        try:
            return self._search(call, call.request.json())
        except ValueError:
            return failure(400, "invalid_request", "Invalid json body")

    def search_get(self, call: Call) -> Reply:
        try:
            return self._search(call, json.loads(call.request.query.get("q", "{}")))
        except ValueError:
            return failure(400, "invalid_request", "Invalid json body")

    def _search(self, call: Call, query: Any) -> Reply:
        if call.kind == "quota":
            midnight = int(call.now // 86400 + 1) * 86400
            refused = {"success": False, "error": "search_quota_exceeded", "msg": "Daily search quota exceeded"}
            return as_json(refused, 429, **{"X-RateLimit-Reset": str(midnight)})
        try:
            rows = search(self._account.offers.values(), query, now=call.now, sloppy=call.kind == "sloppy")
        except SearchRefused as error:
            return failure(400, "invalid_request", str(error))
        return as_json({"offers": rows[: {"none": 0, "one": 1}.get(call.kind or "", len(rows))]})

    # Create

    def create(self, call: Call) -> Reply:
        ask_id = call.id or 0
        try:
            body = call.request.json()
        except ValueError:
            return failure(400, "invalid_request", "Invalid json body")
        if (wrong := order.problem(body)) is not None:
            return failure(400, "invalid_args", f"error 400/3464: Invalid args: {wrong}", ask_id=ask_id)
        ask = self._account.offers.get(ask_id)
        if (refused := self._refused(call, ask, ask_id)) is not None:
            return refused
        return self._rent(call, self._account.offers[ask_id], body)

    def _refused(self, call: Call, ask: Offer | None, ask_id: int) -> Reply | None:
        unavailable = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
        gone = f"error 410/3907: no_such_ask Instance type by id {ask_id} is no longer available."
        if ask is not None and call.kind in ("race-400", "race-404", "race-410"):
            ask.rented = True  # somebody else was faster
        match call.kind:
            case "race-400":
                return failure(400, "invalid_args", f"error 400/3603: no_such_ask {ask_id}", ask_id=ask_id)
            case "race-404":
                return failure(404, "invalid_args", unavailable, ask_id=ask_id)
            case "not-yours":
                return failure(403, "invalid_args", "error 403/3586: not your offer", ask_id=ask_id)
            case "insufficient-credit":
                return failure(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
            case "spend-rate-limit":
                return failure(400, "spend_rate_limit", "New accounts are limited in what they spend an hour.")
            case "refused":
                return as_json({"success": False, "msg": "Could not create the instance"})
            case "empty-400":
                return Reply(status=400)
        if ask is None or (ask.rented and call.kind != "race-410"):
            return failure(404, "invalid_args", unavailable, ask_id=ask_id)
        if call.kind == "race-410":
            return failure(410, "no_such_ask", gone, ask_id=ask_id)
        if self._account.credit_left(call.now) <= 0:
            return failure(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
        return None

    def _rent(self, call: Call, ask: Offer, body: dict[str, Any]) -> Reply:
        if call.kind == "env-dropped":
            body = body | {"env": {}}
        instance = self._account.create(
            ask, body, now=call.now, script=self._faults.take("machine", machine_id=ask.row["machine_id"]) or "",
            invisible_reads=INVISIBLE_READS if call.kind == "invisible" else 0,
        )  # fmt: skip
        call.made = instance.id
        if call.kind == "error-with-contract":
            instance.stop(call.now)
            return failure(400, "invalid_price", "bid is too low", new_contract=instance.id, ask_id=ask.ask_id)
        return as_json({"success": True, "new_contract": instance.id, "instance_api_key": instance.api_key})

    # Reading

    def show(self, call: Call) -> Reply:
        return as_json({"instances": self._account.read(call.id or 0, now=call.now)})

    def list_v0(self, call: Call) -> Reply:
        if call.kind == "v0-open":
            rows = self._account.rows(now=call.now)
            return as_json({"instances_found": len(rows), "instances": rows})
        use = "/api/v0/instances/ is deprecated. Use /api/v1/instances/ instead."
        return failure(410, "deprecated_endpoint", use)

    def list_v1(self, call: Call) -> Reply:
        rows = self._account.rows(now=call.now, lagging=call.kind == "lag")
        query = dict(call.request.query)
        if call.kind == "moving" or (self._moving and "after_token" in query):
            rows = self._moved(rows, first="after_token" not in query)
        try:
            if call.kind == "empty-page":
                shown = pages.page([], query)
                return as_json(shown | {"next_token": pages.token(0), "total_instances": len(rows)})
            return as_json(pages.page(rows, query))
        except pages.PageRefused:
            return failure(400, "invalid_token", "after_token is not valid")
        except SearchRefused as error:
            return failure(400, "invalid_request", str(error))

    def _moved(self, rows: list[dict[str, Any]], *, first: bool) -> list[dict[str, Any]]:
        """First page: as it is. Later ones: the first row has gone and a foreign one has come at the end."""
        self._moving = first
        if first or not rows:
            return rows
        return [*rows[1:], rows[-1] | {"id": 10**9, "label": "came-between-two-pages"}]

    def filters(self, call: Call) -> Reply:
        return as_json({"success": True, "filters": {}})

    def user(self, call: Call) -> Reply:
        credit = round(self._account.credit_left(call.now), 4)
        return as_json({
            "id": 4711, "email": "someone@example.org", "credit": credit, "balance": 0.0, "ssh_key": None, "sid": "S",
            "key_id": 7, "username": "someone", "can_pay": True, "has_billing": True, "total_spent": 0.0,
        })  # fmt: skip

    def gpu_names(self, call: Call) -> Reply:
        return as_json({"success": True, "gpu_names": [gpu[0] for gpu in GPUS]})

    # Changing

    def manage(self, call: Call) -> Reply:
        instance = self._account.find(call.id or 0, now=call.now)
        if instance is None:
            return _no_such_instance(call.id)
        try:
            body = call.request.json()
        except ValueError:
            return failure(400, "invalid_request", "Invalid json body")
        self._account.touch(instance)
        match body:
            case {"label": str(label)} if len(label) <= 1024:
                instance.body = instance.body | {"label": label}
            case {"label": str()}:
                return failure(400, "label_too_long", "label is longer than 1024 characters")
            case {"state": "stopped"}:
                instance.stop(call.now)
            case {"state": "running"} if call.kind == "queued":
                instance.start(call.now, after_s=QUEUED_S)
                queued = "Required resources are currently unavailable, state change queued."
                return as_json({"success": False, "msg": queued})
            case {"state": "running"}:
                instance.start(call.now, after_s=RESTART_S)
            case _:
                return failure(400, "invalid_args", "error 400/2010: Invalid args")
        return as_json({"success": True})

    def destroy(self, call: Call) -> Reply:
        instance = self._account.find(call.id or 0, now=call.now)
        if instance is None:
            return _no_such_instance(call.id)
        self._account.touch(instance)
        if call.kind != "ignored":
            instance.destroy(call.now, linger_reads=SLOW_DESTROY_READS if call.kind == "slow" else LINGER_READS)
        if call.kind == "gone-400":
            return failure(400, "no_such_instance", f"Instance {call.id} not found.")
        return as_json({"success": True, "msg": f"Instance {call.id} is being destroyed."})

    def destroy_many(self, call: Call) -> Reply:
        if not self._bulk:
            return failure(405, "not_allowed", "bulk destroy is switched off in this fake")
        for instance_id in call.request.json().get("instance_ids", []):
            if (instance := self._account.find(instance_id, now=call.now)) is not None:
                self._account.touch(instance)
                instance.destroy(call.now, linger_reads=LINGER_READS)
        return as_json({"success": True})

    # Logs

    def logs(self, call: Call) -> Reply:
        instance = self._account.find(call.id or 0, now=call.now)
        if instance is None:
            return failure(404, "invalid_id", f"Instance {call.id} not found.")
        body = call.request.json()
        if any(not isinstance(value, str) for value in body.values()):
            return failure(400, "invalid_args", "tail, filter and daemon_logs are strings")
        path = self._results.add(self._log_text(call, body), never=call.kind == "never")
        return as_json({"success": True, "result_url": call.elsewhere + path, "msg": "log file requested"})

    def _log_text(self, call: Call, body: dict[str, str]) -> bytes:
        lines = self._logs_of(call.id or 0).splitlines(keepends=True)
        if body.get("daemon_logs") == "true":
            lines = [b"docker daemon: nothing to report\n"]
        if wanted := body.get("filter"):
            lines = [line for line in lines if wanted.encode() in line]
        tail = int(body.get("tail") or "1000")
        return b"".join(lines[-tail:] if tail > 0 else [])

    def execute(self, call: Call) -> Reply:
        if self._account.find(call.id or 0, now=call.now) is None:
            return failure(404, "invalid_id", f"Instance {call.id} not found.")
        command = str(call.request.json().get("command") or "")
        if len(command) > 512 or (command.split() or [""])[0] not in COMMANDS:
            return failure(400, "invalid_args", "Invalid command given.")
        path = self._results.add(b"total 0\n", never=False)
        return as_json({"success": True, "result_url": call.elsewhere + path, "writeable_path": "/var/lib/docker/"})


def _no_such_instance(instance_id: int | None) -> Reply:
    return failure(404, "no_such_instance", f"Instance {instance_id} not found.")
