"""What a create call must look like; what the real service would drop in silence is refused here. Pure."""

from __future__ import annotations

import re
from typing import Any

from tests.lab.fake_vast.records import PORT_FLAG

RUNTYPES = {
    "args",
    "ssh",
    "ssh_proxy",
    "ssh_direct",
    "ssh_direc",
    "jupyter_proxy",
    "jupyter_direc",
    "jupyter_direct",
    "jupyter",
}
FIELDS = {
    "client_id", "image", "disk", "env", "label", "runtype", "args", "args_str", "onstart", "image_login", "price",
    "template_hash_id", "template_id", "cancel_unavail", "target_state", "force", "python_utf8", "lang_utf8",
    "use_jupyter_lab", "jupyter_dir", "extra", "user", "volume_info", "vm",
}  # fmt: skip
MAX_START_BYTES, MAX_VALUE_CHARS, MAX_ENV_CHARS, MAX_PORTS = 4096, 256, 32768, 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OTHER_FLAG = re.compile(r"-v \S+:\S+|-h|-h \S+|--\S+.*")


def problem(body: Any) -> str | None:
    """What is wrong with a create body, or None."""
    if not isinstance(body, dict):
        return "the body is not an object"
    if unknown := sorted(set(body) - FIELDS):
        return f"unknown fields: {', '.join(unknown)}"
    checks = (_image, _disk, _label, _env, _ports, _run, _price)
    return next((text for check in checks if (text := check(body))), None)


def start_is_executable(body: dict[str, Any]) -> bool:
    """In args mode onstart replaces the ENTRYPOINT: it must be one executable, not a line for a shell."""
    onstart = body.get("onstart")
    return body.get("runtype") != "args" or onstart is None or not re.search(r"[\s;&|]", onstart)


def _image(body: dict[str, Any]) -> str | None:
    image = body.get("image")
    return None if isinstance(image, str) and 0 < len(image) <= 1024 else "image is required, at most 1024 characters"


def _disk(body: dict[str, Any]) -> str | None:
    disk = body.get("disk")
    good = isinstance(disk, (int, float)) and not isinstance(disk, bool) and disk >= 8
    return None if good else "disk must be a number of GB, at least 8"


def _label(body: dict[str, Any]) -> str | None:
    label = body.get("label")
    good = label is None or (isinstance(label, str) and len(label) <= 256)
    return None if good else "label must be a string of at most 256 characters"


def _env(body: dict[str, Any]) -> str | None:
    env = body.get("env")
    if not isinstance(env, dict):
        return "env must be an object"
    for name, value in env.items():
        if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
            return f"env value of {name} must be a string of at most {MAX_VALUE_CHARS} characters"
        if not (PORT_FLAG.fullmatch(name) or _OTHER_FLAG.fullmatch(name) or _NAME.fullmatch(name)):
            return f"env key {name!r} is neither a name nor a docker flag"
    if sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_CHARS:
        return f"env is larger than {MAX_ENV_CHARS} characters"
    return None


def _run(body: dict[str, Any]) -> str | None:
    runtype, args, onstart = body.get("runtype"), body.get("args"), body.get("onstart")
    if not isinstance(runtype, str) or not runtype or not set(runtype.split()) <= RUNTYPES:
        return f"runtype {runtype!r}"
    if args is not None and (runtype != "args" or not _is_strings(args)):
        return "args is a list of strings, for runtype args alone"
    if onstart is not None and not isinstance(onstart, str):
        return "onstart must be a string"
    size = (
        len("".join(args or ()).encode())
        + len((onstart or "").encode())
        + len(str(body.get("args_str") or "").encode())
    )
    return f"args and onstart are {size} bytes, more than {MAX_START_BYTES}" if size > MAX_START_BYTES else None


def _price(body: dict[str, Any]) -> str | None:
    price = body.get("price")
    good = price is None or (isinstance(price, (int, float)) and not isinstance(price, bool) and 0.001 <= price <= 128)
    return None if good else "price must be null or 0.001 to 128"


def _ports(body: dict[str, Any]) -> str | None:
    count = sum(1 for name in body["env"] if PORT_FLAG.fullmatch(name))
    return None if count <= MAX_PORTS else f"{count} ports asked for, at most {MAX_PORTS}"


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
