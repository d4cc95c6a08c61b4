"""What a container finds inside: its directories, its environment, its Python. No sockets, no processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.lab.fake_vast import held
from tests.lab.fake_vast.instances import Instance
from tests.lab.fake_vast.records import SAME_PORT_FROM, variables

SYSTEM_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
PIP_PROXY_PORT = 3128  # in a namespace: the way out to the package index, for pip alone
_IDLE_PIP = """
import sys
for word in sys.argv[2:]:
    if not word.startswith("-"):
        print("Requirement already satisfied:", word)
"""
_ASK_PYTHON = """
import json, os, sys, sysconfig
paths = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
version = "%d.%d" % sys.version_info[:2]
exe = os.path.realpath(sys.executable)
print(json.dumps({"paths": paths, "version": version, "exe": exe, "prefix": sys.base_prefix}))
"""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """How containers run.

    isolation: "namespace" (a network and a process namespace each; needs root or user namespaces), "plain" (ordinary
    processes), or "best" of what works here. python: an interpreter; each container has a virtual environment of its
    own over it, so pip finds what is installed there and installs what is not. wheels: pip takes packages from this
    folder alone; None: from the index that pip is configured for. env: variables of the account, given to every
    container; "{address}" in a value is the container's inner address. reach: addresses of the outside that are
    reachable from inside (the API always is). chroot: a bare file system with what python:3.12-slim has, over the
    installation that `python` belongs to. inject: paths that the host puts into a chroot, as it does a GPU's driver.
    pip: "idle" finds everything installed at once, for stages that compute nothing; not in a chroot.
    """

    isolation: str = "best"
    python: str = sys.executable
    wheels: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    reach: tuple[tuple[str, int], ...] = ()
    chroot: bool = False
    inject: tuple[str, ...] = ()
    pip: Literal["real", "idle"] = "real"


@dataclass(frozen=True)
class Python:
    """An interpreter as it describes itself."""

    exe: str
    prefix: str
    version: str
    paths: tuple[str, ...]

    @classmethod
    def ask(cls, python: str) -> Python:
        out = subprocess.run([python, "-c", _ASK_PYTHON], check=True, capture_output=True, text=True, timeout=30).stdout
        told: dict[str, Any] = json.loads(out)
        return cls(told["exe"], told["prefix"], told["version"], tuple(told["paths"]))


def make_home(folder: Path, python: Python, *, pip: Literal["real", "idle"]) -> None:
    """The container's folders, and its virtual environment, which sees what the interpreter's own environment holds."""
    for name in ("home", "tmp", "venv/bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    site = folder / "venv" / "lib" / f"python{python.version}" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    (folder / "venv" / "pyvenv.cfg").write_text(
        f"home = {Path(python.exe).parent}\ninclude-system-site-packages = false\nversion = {python.version}\n"
    )
    (site / "underneath.pth").write_text("".join(f"{path}\n" for path in python.paths))
    (site / "lab_held.py").write_text(Path(held.__file__).read_text())
    (site / "lab_held.pth").write_text("import lab_held\n")
    for name in ("python", "python3", f"python{python.version}"):
        link = folder / "venv" / "bin" / name
        if not link.is_symlink():
            link.symlink_to(python.exe)
    if pip == "idle":
        (site / "pip").mkdir(exist_ok=True)
        (site / "pip" / "__init__.py").touch()  # without it the one underneath would come first
        (site / "pip" / "__main__.py").write_text(_IDLE_PIP)
    command = folder / "venv" / "bin" / "pip"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(str(folder / "venv/bin/python"))} -m pip "$@"\n')
    command.chmod(0o755)


def environment(instance: Instance, inside: Inside, *, folder: Path, address: str, isolated: bool) -> dict[str, str]:
    """The start command's environment: never this process's own, but for pip's settings."""
    env = _base(folder, chroot=inside.chroot) | _pip(inside, isolated=isolated)
    if not isolated:  # on one host each container needs an address of its own to listen on
        env["PPSMOKE_NODE_LISTEN"] = f"{address}:7070,{address}:7071"
    env |= {name: value.replace("{address}", address) for name, value in inside.env.items()}
    env |= variables(instance.body["env"])
    return env | given_by_vast(instance)


def given_by_vast(instance: Instance) -> dict[str, str]:
    """What the service itself sets in a container."""
    env = {
        "CONTAINER_ID": str(instance.id),
        "CONTAINER_API_KEY": instance.api_key,
        "VAST_CONTAINERLABEL": f"C.{instance.id}",
        "PUBLIC_IPADDR": instance.address,
        "GPU_COUNT": str(instance.offer.row["num_gpus"]),
        "DATA_DIRECTORY": "/workspace",
        "DIRECT_PORT_START": "-1",
        "DIRECT_PORT_END": "-1",
    }
    if instance.script == "no-key":
        del env["CONTAINER_API_KEY"]
    for name, external in instance.ports.items():
        number, _, protocol = name.partition("/")
        env[f"VAST_{protocol.upper()}_PORT_{number}"] = str(external)
    return env


def start_argv(body: Mapping[str, Any]) -> list[str]:
    """The command that the container runs: onstart as the ENTRYPOINT with args, or a launcher's shell with onstart."""
    onstart = body.get("onstart")
    if body.get("runtype") == "args":
        argv = ([onstart] if onstart else []) + list(body.get("args") or shlex.split(body.get("args_str") or ""))
        return argv or ["python3"]
    return ["/bin/sh", "-c", f"{onstart or ''}\nexec sleep 1000000000"]


def listens_on(name: str, external: int) -> int:
    """The port inside for "7070/tcp"."""
    number = int(name.partition("/")[0])
    return external if number >= SAME_PORT_FROM else number


def _base(folder: Path, *, chroot: bool) -> dict[str, str]:
    if chroot:
        return {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8"}
    home = folder / "home"
    return {
        "PATH": f"{folder / 'venv' / 'bin'}:{SYSTEM_PATH}",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
    }


def _pip(inside: Inside, *, isolated: bool) -> dict[str, str]:
    if inside.wheels is not None:
        wheels = "/wheels" if inside.chroot else str(inside.wheels)
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels, "PIP_CONFIG_FILE": os.devnull}
    env = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return env | ({"PIP_PROXY": f"http://127.0.0.1:{PIP_PROXY_PORT}"} if isolated else {})
