"""The user's vast.ai key: where it may come from, and a wrapper that no log, repr or traceback shows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ppsmoke.errors import UsageError
from ppsmoke.keys import derive

KEY_VARIABLE = "VAST_API_KEY"
MAX_KEY_CHARS = 1024  # real ones have 64; a file far longer than this is no key file
MIN_SECRET_CHARS = 8  # a lab's key of a letter or two is in any text by chance, so such a one is not searched for
_PRINTABLE = re.compile(r"[!-~]+")
HINT = f"give --api-key KEY, --api-key - (reads it from stdin), {KEY_VARIABLE}, or the official client's key file"


class ApiKey:
    """A key that prints as dots. `reveal` has two callers: the Authorization header and the pipe to the reaper."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        # Checked here: http.client's own complaint about a bad header value quotes the whole header.
        text = text.strip()
        if not _PRINTABLE.fullmatch(text) or len(text) > MAX_KEY_CHARS:
            raise UsageError("the API key is empty or holds characters that no key has", hint=HINT)
        self._text = text

    def reveal(self) -> str:
        return self._text

    def fingerprint(self) -> str:
        """8 hex digits that tell two keys apart and give neither away."""
        return derive(self._text.encode(), "account", 4).hex()

    def redact(self, body: bytes) -> bytes:
        """`body` without the key, should a service have echoed it: its words are shown and logged."""
        return body.replace(self._text.encode(), b"[key]") if len(self._text) >= MIN_SECRET_CHARS else body

    def __repr__(self) -> str:
        return "ApiKey(...)"

    __str__ = __repr__

    def __reduce__(self) -> str | tuple:
        raise TypeError("an API key is not pickled")


def key_files(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Where the official client keeps its key: the place of today, then the one of its first years."""
    config = environ.get("XDG_CONFIG_HOME") or str(home / ".config")
    return [Path(config) / "vastai" / "vast_api_key", home / ".vast_api_key"]


def find_key(
    argument: str | None, *, environ: Mapping[str, str], home: Path, read_stdin: Callable[[], str]
) -> tuple[ApiKey, str]:
    """The key and where it came from: `--api-key` (`-` reads a line of stdin), then VAST_API_KEY, then the official
    client's key file. Raises UsageError when there is none, or when the first source that exists is unusable."""
    if argument == "-":
        return ApiKey(read_stdin()), "stdin"
    if argument is not None:
        return ApiKey(argument), "--api-key"
    if environ.get(KEY_VARIABLE, "").strip():
        return ApiKey(environ[KEY_VARIABLE]), KEY_VARIABLE
    for path in key_files(environ, home):
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                return ApiKey(file.read(MAX_KEY_CHARS + 2)), str(path)
        except FileNotFoundError:
            continue
        except (OSError, UsageError) as error:
            reason = error.strerror if isinstance(error, OSError) else "holds no usable key"
            raise UsageError(f"cannot take the API key from {path}: {reason}", hint=HINT) from None
    raise UsageError("no vast.ai API key", hint=HINT)


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a child process of ours: everything but the key."""
    return {name: value for name, value in environ.items() if name != KEY_VARIABLE}
