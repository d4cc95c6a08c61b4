"""What a reply of the vast.ai API means. Pure; the body is read before the status, since the status alone lies:
a bad key and a lost offer are both 404, a 429 is often plain text, and an error can name an instance it made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ppsmoke.errors import RentError
from ppsmoke.rent.vast_http import Reply

MAX_TEXT_CHARS = 300  # of what a service says in one of our lines


class VastError(RentError):
    """The API did not do what was asked."""


class AuthRefused(VastError):
    """The key is wrong, revoked, expired or lacks a permission: nothing else will work either."""


class QuotaSpent(VastError):
    """The account's searches of today are used up; `resets_at` in seconds since 1970, None if it was not said."""

    def __init__(self, cause: str, *, resets_at: float | None, **kwargs: Any) -> None:
        super().__init__(cause, **kwargs)
        self.resets_at = resets_at


class Unreachable(VastError):
    """No usable answer in the time given: no network, 5xx, 429 without end."""


class NoTurn(Unreachable):
    """Nothing was sent: other calls on the route were before it, until its time was over."""


class BadReply(VastError):
    """An answer that is not what the API documents. Never read as "there is nothing"."""


class Refused(VastError):
    """A definite no to a call that was understood; `error` is the API's word, `status` the HTTP status."""

    def __init__(self, cause: str, *, status: int, error: str, **kwargs: Any) -> None:
        super().__init__(cause, **kwargs)
        self.status = status
        self.error = error


@dataclass(frozen=True)
class Accepted:
    """The service did what was asked; `json` is an object."""

    json: dict[str, Any]


@dataclass(frozen=True)
class TooOften:
    """429: definitely not done. `wait_s` is what the service asks for, if it does."""

    wait_s: float | None
    text: str


@dataclass(frozen=True)
class Unclear:
    """Nobody knows whether it was done: 5xx, or a body that says nothing."""

    text: str


Verdict = Accepted | TooOften | Unclear | VastError  # an error is a value here; the caller raises it


@dataclass(frozen=True)
class Created:
    """An instance exists. The reply's `instance_api_key` is left there: its own container gets it from the service."""

    instance_id: int


@dataclass(frozen=True)
class OfferLost:
    """Somebody else has it, or its host refuses: try the next offer."""

    text: str


@dataclass(frozen=True)
class CreateRefused:
    """No offer would fare better: our request is wrong, the key is, or the money is gone."""

    error: VastError


@dataclass(frozen=True)
class CreatedAnyway:
    """An error that made an instance all the same (stopped, its storage billed): end it, then heed `because`."""

    instance_id: int
    because: OfferLost | CreateRefused


CreateOutcome = Created | OfferLost | CreateRefused | CreatedAnyway | TooOften | Unclear


def judge(reply: Reply) -> Verdict:
    """The meaning of any reply but a create's."""
    body = reply.json
    error, text = _error_word(body), said(reply)
    if _is_auth(reply.status, error, text):
        return AuthRefused(
            f"the API refused the key: {text}", phase="rent", hint="check the key at https://cloud.vast.ai/manage-keys/"
        )
    if reply.status == 429:
        if "quota" in error:
            reset = _number(reply.headers.get("x-ratelimit-reset"))
            return QuotaSpent(
                f"the searches of today are used up: {text}", resets_at=reset, phase="rent", hint="wait for the reset"
            )
        return TooOften(_wait_asked_for(reply, body), text)
    if 300 <= reply.status < 400:
        return BadReply(
            f"a redirect ({reply.status}), which is not followed: it would carry the key along",
            phase="rent",
            hint="check VAST_URL",
        )
    if reply.status >= 500 or reply.status == 408:  # a gateway's: nobody knows what became of the request behind it
        return Unclear(f"HTTP {reply.status}: {text}")
    if reply.status >= 400 or (isinstance(body, dict) and body.get("success") is False):
        # No route of the API answers a page of HTML.
        hint = "check VAST_URL: is it the API's address?" if reply.status == 404 and body is None else ""
        return Refused(f"HTTP {reply.status}: {text}", status=reply.status, error=error, phase="rent", hint=hint)
    if not isinstance(body, dict):
        return Unclear(f"HTTP {reply.status} with a body that is no JSON object: {text}")
    return Accepted(body)


# The lost race comes as 400, 404 and 410, sometimes under the name invalid_args: only the words are sure.
_OFFER_GONE = re.compile(r"no_such_ask|is not available|no longer available", re.IGNORECASE)
_NO_MONEY = re.compile(r"insufficient_credit|spend_rate_limit|missing_billing", re.IGNORECASE)


def judge_create(reply: Reply) -> CreateOutcome:
    """The meaning of a create's reply. `new_contract` counts in every reply, whatever its status."""
    body = reply.json
    instance_id = _whole(body.get("new_contract")) if isinstance(body, dict) else None
    refusal = _judge_refusal(reply)
    if instance_id is None:
        return refusal
    if reply.status < 300 and isinstance(body, dict) and body.get("success") is not False:
        return Created(instance_id)
    return CreatedAnyway(instance_id, refusal if isinstance(refusal, CreateRefused) else OfferLost(said(reply)))


def _judge_refusal(reply: Reply) -> OfferLost | CreateRefused | TooOften | Unclear:
    text = said(reply)
    everything = reply.body.decode("utf-8", "replace")
    verdict = judge(reply)
    if isinstance(verdict, TooOften | Unclear):
        return verdict
    if isinstance(verdict, Accepted):
        return Unclear(f"HTTP {reply.status} without new_contract: {text}")
    if isinstance(verdict, AuthRefused):
        return CreateRefused(verdict)
    if isinstance(verdict, Refused):
        if _NO_MONEY.search(everything):
            verdict.hint = "add credit at https://cloud.vast.ai/billing/"
            return CreateRefused(verdict)
        if reply.status in (200, 400, 404, 410) and _OFFER_GONE.search(everything):
            return OfferLost(text)
        if verdict.error in ("invalid_args", "invalid_request", "invalid_price"):
            # 403/3586 "not your offer" is about this offer; every other invalid_args is about our request.
            return OfferLost(text) if reply.status == 403 else CreateRefused(verdict)
        if reply.status == 404 and reply.json is None:
            return CreateRefused(verdict)  # not the API
        # An empty 400, a 200 with success false: this host will not; another may.
        return OfferLost(text)
    return CreateRefused(verdict)


def is_already_gone(verdict: Verdict) -> bool:
    """Does a DELETE's refusal say that there is nothing to end? 404 alone does not: a revoked key gets one too."""
    return isinstance(verdict, Refused) and (
        "no_such_instance" in (verdict.error + verdict.cause)
        or (verdict.status == 404 and verdict.error == "not_found")
    )


def said(reply: Reply) -> str:
    """What the service says, on one line and short: msg, message, detail or error of JSON, else the bare text."""
    body = reply.json
    if isinstance(body, dict):
        words = [body.get(name) for name in ("error", "msg", "message", "detail")]
        text = ": ".join(dict.fromkeys(word for word in words if isinstance(word, str) and word))
        return one_line(text) or "no reason given"
    text = reply.body[:4096].decode("utf-8", "replace")
    if "<html" in text.lower() or text.lstrip().lower().startswith("<!doctype"):
        return "a page of HTML"
    return one_line(text) or "an empty body"


def one_line(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Printable, one line, at most `limit` characters: a host's words must not move the cursor of our terminal."""
    flat = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def _is_auth(status: int, error: str, text: str) -> bool:
    if error == "auth_error" or "Session expired" in text or "Two Factor" in text:
        return True
    return status == 401 or (status == 403 and error in ("not_authorized", "forbidden", "permission_denied"))


def _error_word(body: Any) -> str:
    word = body.get("error") if isinstance(body, dict) else None
    return word if isinstance(word, str) else ""


def _wait_asked_for(reply: Reply, body: Any) -> float | None:
    in_body = body.get("retry_after") if isinstance(body, dict) else None
    wait = _number(in_body if in_body is not None else reply.headers.get("retry-after"))
    return wait if wait is not None and wait >= 0 else None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number and abs(number) != float("inf") else None


def _whole(value: Any) -> int | None:
    """A positive whole number, also as a string of digits; never a bool."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if number > 0 else None
