"""A request and a reply as values, the replies that many routes share, and what a fault makes of a reply. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

HTML_404 = b"<!DOCTYPE html><html><body><h1>404 Not Found</h1></body></html>"
HTML_502 = (
    b"<html><head><title>502 Bad Gateway</title></head><body><center><h1>502 Bad Gateway</h1></center></body></html>"
)
HUGE_BYTES = 48 << 20
TOO_OFTEN = "API requests too frequent: endpoint threshold={:.1f}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call as it arrived; `key` is the bearer's, `t` the fake world's epoch seconds."""

    method: str
    path: str  # with its query
    query: dict[str, str]
    headers: dict[str, str]  # Authorization redacted
    body: bytes
    key: str | None
    t: float

    def json(self) -> Any:
        """The decoded body; raises ValueError."""
        return json.loads(self.body or b"{}")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """manner: how the bytes leave: whole; reset (no byte, RST); hang (no byte); cut (half the body); drip (slowly)."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    manner: Literal["whole", "reset", "hang", "cut", "drip"] = "whole"


def as_json(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status=status, body=json.dumps(value).encode(), headers=headers)


def failure(status: int, error: str, msg: str, **more: Any) -> Reply:
    return as_json({"success": False, "error": error, "msg": msg, **more}, status)


def not_found_page() -> Reply:
    return Reply(status=404, body=HTML_404, content_type="text/html; charset=utf-8")


def bad_key(status: int) -> Reply:
    return failure(status, "auth_error", "Invalid user key")


def too_often(threshold_s: float) -> Reply:
    return Reply(status=429, body=TOO_OFTEN.format(threshold_s).encode(), content_type="text/plain; charset=utf-8")


def without_effect(kind: str, *, elsewhere: str) -> Reply | None:
    """The reply of a fault that strikes before the call does anything; None for the other kinds."""
    page = Reply(status=502, body=HTML_502, content_type="text/html")
    auth_expired = "Session expired. Please log in again."
    match kind:
        case "reset" | "hang":
            return Reply(manner=kind)
        case "502":
            return page
        case "503":
            return replace(page, status=503)
        case "500":
            return failure(500, "server_error", "Something went wrong on the server")
        case "empty":
            return Reply()
        case "null":
            return Reply(body=b"null")
        case "html":
            return Reply(body=b"<html><body>Maintenance</body></html>", content_type="text/html")
        case "huge":
            return Reply(
                body=b'{"success": true, "offers": [], "instances": null, "padding": "' + b" " * HUGE_BYTES + b'"}'
            )
        case "redirect":
            return Reply(status=307, headers={"Location": f"{elsewhere}/elsewhere"})
        case "429":
            return too_often(3.0)
        case "429-header":
            return replace(too_often(3.0), headers={"Retry-After": "1"})
        case "429-json":
            return failure(429, "rate_limit_exceeded", "API requests too frequent", retry_after=1)
        case "429-detail":
            return as_json({"detail": "API requests too frequent"}, 429)
        case "401":
            return bad_key(401)
        case "404-auth":
            return bad_key(404)
        case "session-expired":
            return failure(404, "auth_error", auth_expired)
        case "two-factor":
            return failure(401, "auth_error", "Two Factor Authentication is required for this action")
        case "403":
            return failure(403, "not_authorized", "This key lacks the permission instance_write")
        case _:
            return None


def after_effect(kind: str | None, reply: Reply) -> Reply:
    """What the fault leaves of the true reply of a call that has had its effect."""
    match kind:
        case "reset-after" | "hang-after":
            return replace(reply, manner=kind.removesuffix("-after"))
        case "cut-after":
            return replace(reply, manner="cut")
        case "drip":
            return replace(reply, manner="drip")
        case "wrong-type":
            return replace(reply, content_type="text/plain")
        case "502-after" | "500-after" | "empty-after" | "null-after":
            return without_effect(kind.removesuffix("-after"), elsewhere="") or reply
        case _:
            return reply
