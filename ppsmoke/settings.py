"""What one run is to do: built once by cli.py (or testing.py), frozen, handed out in pieces; where runs keep notes."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ppsmoke.errors import InputError, UsageError
from ppsmoke.keys import new_run_key

RENTED_MODEL = "llama3.2:1b"  # spec, section 1
LOOPBACK_MODEL = "smollm2:135m"  # 98 MB, in a wheel: needs no account and no model hub
WIRE_DTYPES = ("bfloat16", "float16", "float32")
DEVICES = ("CPU", "CUDA")  # what a stage can compute on, with or without an index
MAX_STAGES = 64
MAX_CONTEXT_TOKENS = 131_072
_COUNTRY = re.compile("[A-Z]{2}")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]{0,300}", re.ASCII)
_DEVICE = re.compile(rf"(({'|'.join(DEVICES)})(:\d+)?)?", re.IGNORECASE | re.ASCII)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def state_dir(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> Path:
    """Where logs and journals are kept: `$XDG_STATE_HOME/ppsmoke`, by default `~/.local/state/ppsmoke`."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else (home or Path.home()) / ".local" / "state") / "ppsmoke"


def new_run_id() -> str:
    """Eight hex digits; names a run in labels, logs and the environment of its stages."""
    return secrets.token_hex(4)


def _as_typed(value: object) -> str:
    """A number without an exponent that nobody has written."""
    return f"{value:.15g}" if isinstance(value, float) else repr(value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. Lengths in tokens, times in seconds. Raises UsageError or InputError for values that cannot work."""

    prompt: str = "Say hello"
    raw: bool = False  # True: no chat template around the prompt
    max_tokens: int = 64  # spec, section 1
    model: str = LOOPBACK_MODEL
    num_stages: int = 2
    max_context: int = 2048
    wire_dtype: str = "bfloat16"
    device: str = ""  # "" lets each stage choose
    budget_s: float = 300.0  # wall clock for all but destroying; spec, section 1
    lifetime_s: float | None = None  # a stage ends itself after so long; None: the budget and the time to destroy
    verbosity: int = 0  # -1 quiet, 0 normal, 1 with the stages' own output and tracebacks
    as_json: bool = False
    run_id: str = field(default_factory=new_run_id)
    run_key: bytes = field(default_factory=new_run_key, repr=False)

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("--max-tokens", self.max_tokens, 1, MAX_CONTEXT_TOKENS),
            ("--stages", self.num_stages, 1, MAX_STAGES),
            ("--max-context", self.max_context, 2, MAX_CONTEXT_TOKENS),
            ("--budget", self.budget_s, 1, 86_400),
        ):
            if not isinstance(value, (int, float)) or not low <= value <= high:
                raise UsageError(f"{what} {_as_typed(value)} is out of range", hint=f"give {low} to {high}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise UsageError(f"--wire-dtype {self.wire_dtype} is unknown", hint=f"one of {', '.join(WIRE_DTYPES)}")
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"--device {self.device} is unknown", hint=f"one of {', '.join(DEVICES)}")
        if _LONE_SURROGATE.search(self.prompt):
            raise InputError("the prompt is not valid UTF-8", hint="write it in UTF-8")
        if not self.model or _LONE_SURROGATE.search(self.model) or "\0" in self.model or "\n" in self.model:
            raise UsageError("--model is empty or holds characters that no model name has")


@dataclass(frozen=True, kw_only=True)
class RentSettings:
    """What to rent, for how much, and whether to ask before. Raises UsageError for values that cannot work."""

    gpu: str = ""  # as typed; "": any
    max_dph: float = 1.0  # $/h of one machine
    regions: tuple[str, ...] = ()  # two-letter country codes; (): anywhere
    min_reliability: float = 0.98
    disk_gb: float = 16.0
    max_usd: float = 1.0  # the most that the run may cost, replaced hosts included
    image: str = ""  # "": the public Python image
    baked: bool = False  # the image holds our code, tinygrad and numpy
    confirm: Literal["ask", "yes"] = "ask"  # on a terminal, before the first create
    dry_run: bool = False

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("--max-dph", self.max_dph, 0.001, 1000),
            ("--min-reliability", self.min_reliability, 0, 1),
            ("--disk", self.disk_gb, 8, 10_000),
            ("--max-usd", self.max_usd, 0.001, 100_000),
        ):
            if not low <= value <= high:
                raise UsageError(f"{what} {_as_typed(value)} is out of range", hint=f"give {low:g} to {high}")
        for region in self.regions:
            if not _COUNTRY.fullmatch(region):
                raise UsageError(f"--region {region} is no country", hint="two letters each, e.g. --region SE,DE")
        if self.baked and not self.image:
            raise UsageError("--baked without --image", hint="name the image that was built from the Dockerfile")
        if self.image and not _IMAGE.fullmatch(self.image):
            raise UsageError("--image is no image's name", hint="registry/name:tag")
