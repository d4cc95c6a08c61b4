"""Errors as the message that tells the orchestrator of them."""

from __future__ import annotations

import traceback

from ppsmoke.errors import SmokeError, os_hint
from ppsmoke.pipeline.messages import StageFailed

MAX_DETAIL_CHARS = 16 << 10


def failure(request_id: int, error: Exception, *, stage: int, phase: str = "ask") -> StageFailed:
    """The StageFailed that says this error, in its own phase or else in this one; one that is none of ours brings its
    traceback as detail."""
    if isinstance(error, SmokeError):
        phase, cause, hint, detail = error.phase or phase, error.cause, error.hint, error.detail
    else:
        cause, hint = f"{type(error).__name__}: {error}", os_hint(error)
        if not hint:
            cause, hint = f"a mistake of ours: {cause}", "run again with -v"
        detail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    texts = {"phase": phase, "cause": cause or type(error).__name__, "hint": hint, "detail": detail[-MAX_DETAIL_CHARS:]}
    return StageFailed(request_id=request_id, stage=stage, **{name: utf8_safe(text) for name, text in texts.items()})


def utf8_safe(text: str) -> str:
    """The text with what UTF-8 cannot carry (a worker's JSON may hold half a surrogate pair) spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()
