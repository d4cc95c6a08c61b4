"""How a rented container comes up without an image of ours: its start command, and the environment of the create call.

The command arms the dead-man (dead_man.py), then runs pip while it waits for the code (process_one.py), out of which it
goes on (second_stage.py; push.py is our side). A baked image does the same, with nothing to install, by main_baked.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, NoReturn

from ppsmoke.errors import InputError, RentError, UsageError
from ppsmoke.keys import derive
from ppsmoke.rent.api_key import MIN_SECRET_CHARS
from ppsmoke.rent.minify import minify
from ppsmoke.rent.process_one import ProcessOne

if TYPE_CHECKING:
    from ppsmoke.rent.fleet import StageSpec

PROGRAMS = ("dead_man", "process_one")  # what the start command carries; the rest is pushed
PACKAGES = ("tinygrad==0.12.0", "numpy")  # what a computing stage needs besides Python
MAX_COMMAND_BYTES = 4048  # documented for onstart and args together; more is said to work, and not relied on
TCP_PORT, UDP_PORT = 7070, 7071  # inside the container; two numbers, as one cannot be asked for in both protocols
SILENCE_S = 120.0  # issue 3: so long without the orchestrator, once it was heard, and the machine ends itself
MAX_VALUE_CHARS = 255  # the API documents 256 as the limit of a value
MAX_ENVIRONMENT_BYTES = 32_768  # all of it, documented
_STAGE_NAME = re.compile(r"STAGE|NUM_STAGES|SEED_ADDR|MODEL|PPSMOKE_NODE_[A-Z0-9_]+")
_GPU = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",  # libcuda and nvidia-smi; the driver compiles our PTX
    "CUDA_PTX": "1",
}


@dataclass(frozen=True)
class StartCommand:
    """The fields of a create call with `runtype: args`: onstart is the executable, args its arguments."""

    onstart: str
    args: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes that count against MAX_COMMAND_BYTES."""
        return len(self.onstart) + sum(len(word.encode()) for word in self.args)


@functools.cache
def start_command(packages: tuple[str, ...] = PACKAGES) -> StartCommand:
    """The command for an image that has /bin/sh and python3 with pip. Its shell text holds no character that a shell,
    JSON or a template would touch between the single quotes. Raises RentError where it would be too long."""
    sources = "\0".join(minify(*map(program_source, PROGRAMS), keep=program_source("second_stage")))
    packed = base64.b64encode(zlib.compress(sources.encode(), 9)).decode()
    arguments = ",".join(["a", *(f'"{name}"' for name in packages)])
    python = (
        f'import base64,zlib;a,b=zlib.decompress(base64.b64decode("{packed}")).decode().split(chr(0));'
        f'__name__="boot";exec(b);main({arguments})'
    )
    # exec: Python becomes process 1 in the shell's place and stays it. -I -S: nothing that pip installs can change it.
    command = StartCommand("/bin/sh", ("-c", f"exec python3 -ISuc '{python}'"))
    if command.size > MAX_COMMAND_BYTES or "'" in python or "\\" in python:
        raise RentError(f"the start command has {command.size} bytes or unsafe characters", phase="rent")
    return command


def program_source(name: str) -> str:
    """The source text of one of the modules that run in a container, from a folder or a zipapp alike."""
    return (resources.files("ppsmoke.rent") / f"{name}.py").read_text(encoding="utf-8")


def node_secret(run_key: bytes, stage: int, generation: int = 0) -> bytes:
    """What a stage's boot and we prove to each other; no other stage, no replaced host of it and no node has it."""
    return derive(run_key, f"node {stage}" + (f" generation {generation}" if generation else ""))


def create_environment(
    spec: StageSpec,
    *,
    secret: bytes,
    forbidden: Collection[str],
    silence_s: float = SILENCE_S,
    vast_url: str = "",
) -> dict[str, str]:
    """The create call's `env` object: variables, and docker's port flags as keys. spec.environment holds the rest of
    what a node needs, its lifetime included. forbidden: secrets of the user's that must not travel.

    vast_url: where the dead-man finds the API, "" for the real one. Raises InputError for a value of the user's that is
    too long (a model's address), RentError for what is a fault of ours: both before anything is rented.
    """
    environment = {
        **spec.environment,
        **_GPU,
        "PPSMOKE_NODE_SECRET": secret.hex(),
        "PPSMOKE_NODE_LISTEN": f"0.0.0.0:{TCP_PORT},0.0.0.0:{UDP_PORT}",
        "PPSMOKE_NODE_SILENCE_S": f"{silence_s:g}",
        **({"VAST_URL": vast_url} if vast_url else {}),
    }
    for name, value in environment.items():
        _check_variable(name, value, spec.stage, allowed={*_GPU, "VAST_URL"})
    environment[f"-p {TCP_PORT}:{TCP_PORT}"] = "1"
    environment[f"-p {UDP_PORT}:{UDP_PORT}/udp"] = "1"
    text = "\0".join(word for item in environment.items() for word in item)
    if any(len(one) >= MIN_SECRET_CHARS and one in text for one in forbidden):
        raise RentError("a secret of the user's would travel in the environment: refused", phase="rent")
    if len(text.encode()) > MAX_ENVIRONMENT_BYTES:
        raise RentError(f"the environment is larger than {MAX_ENVIRONMENT_BYTES} bytes", phase="rent")
    if len(secret) != 32 or "PPSMOKE_NODE_LIFETIME_S" not in environment:
        raise RentError("a stage without a secret or a lifetime: refused", phase="rent", stage=spec.stage)
    return environment


def _check_variable(name: str, value: str, stage: int, *, allowed: Collection[str]) -> None:
    if not _STAGE_NAME.fullmatch(name) and name not in allowed:
        raise RentError(f"{name} has no place in a stage's environment", phase="rent", stage=stage)
    if len(value.encode()) > MAX_VALUE_CHARS:
        raise InputError(
            f"{name} has {len(value.encode())} bytes, and vast.ai takes {MAX_VALUE_CHARS} in a variable",
            phase="rent",
            stage=stage,
            hint="use a shorter address or a name of the catalogue" if name == "MODEL" else "",
        )
    if any(not character.isprintable() for character in value):
        raise InputError(f"{name} holds a control character", phase="rent", stage=stage)


def main_baked() -> NoReturn:
    """Process 1 of an image that holds this code, tinygrad and numpy: the dead-man and the node as children, and the
    same wait for a push in between; a push without code (its certificates alone) starts the code that is here.

    Raises UsageError where it was started by hand: whoever rents sets the secret, and nobody could prove it here.
    """
    if not re.fullmatch("[0-9a-f]{64}", os.environ.get("PPSMOKE_NODE_SECRET", "")):
        raise UsageError(
            "PPSMOKE_NODE_SECRET is not the secret of a stage",
            hint="boot is what a rented container begins with; a run sets its environment",
        )
    ProcessOne(os.environ, program_source("dead_man"), ()).run()
    raise AssertionError("process 1 has ended its work")
