"""The plainest caller of a vast.ai API: one urllib request, whatever comes back as a value. For tests of the fake."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from tests.lab.fake_vast import FakeVast


@dataclass(frozen=True)
class Answer:
    """`status` 0: no complete reply, `body` then names the error's class."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
_FOLLOWING = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(
    fake: FakeVast,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = "test-key",
    within_s: float = 5.0,
    follow: bool = False,
) -> Answer:
    """One request to the fake; a path that is a whole URL goes there."""
    url = path if path.startswith("http") else fake.url + path
    request = urllib.request.Request(url, method=method, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with (_FOLLOWING if follow else _OPENER).open(request, timeout=within_s) as reply:
            return Answer(reply.status, reply.read(), dict(reply.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(), dict(error.headers))
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Answer(0, type(reason).__name__.encode(), {})


def order(**changes: Any) -> dict[str, Any]:
    """A create body as ppsmoke sends it."""
    body: dict[str, Any] = {
        "client_id": "me",
        "image": "python:3.12-slim",
        "disk": 20.0,
        "env": {"-p 7070:7070": "1", "-p 7071:7071/udp": "1", "STAGE": "0"},
        "label": "ppsmoke-0a1b2c3d-0-4e5f6071-1900000000",
        "price": None,
        "runtype": "args",
        "onstart": "/bin/sh",
        "args": ["-c", "echo hi"],
        "cancel_unavail": True,
    }
    return body | changes


def rent(fake: FakeVast, index: int = 0, **changes: Any) -> int:
    """Rent the index-th offer of the fake; the instance's id."""
    return call(fake, "PUT", f"/api/v0/asks/{fake.offers[index].ask_id}/", order(**changes)).json["new_contract"]


def show(fake: FakeVast, instance_id: int) -> dict[str, Any] | None:
    return call(fake, "GET", f"/api/v0/instances/{instance_id}/").json["instances"]


def listed(fake: FakeVast, query: str = "") -> dict[str, Any]:
    return call(fake, "GET", f"/api/v1/instances/{query}").json


def destroy(fake: FakeVast, instance_id: int, *, key: str | None = "test-key") -> Answer:
    return call(fake, "DELETE", f"/api/v0/instances/{instance_id}/", {}, key=key)
