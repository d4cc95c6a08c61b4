"""A bare file system like python:3.12-slim's: dash, the common tools, Python, and nothing else (no curl, git, clang).

It is built on a tmpfs inside the container's own mount namespace, so it vanishes with the container.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tests.lab.fake_vast.inside import Python

TOOLS = """[ basename base64 cat chmod chown cp cut date dd df dirname du echo env expr false head id kill ln ls md5sum
mkdir mktemp mv nproc printf pwd readlink realpath rm rmdir sed sha256sum sleep sort stat tail tee test timeout touch tr
true uname uniq wc which whoami xargs find grep gzip hostname tar""".split()
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1",
             "libm.so.6", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")  # fmt: skip
ETC = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/debian_version")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FOLDERS = "dev/shm etc home proc root run sys tmp usr/bin usr/lib usr/lib64 usr/local/bin usr/sbin var/tmp workspace"
MERGED = ("bin", "lib", "lib64", "sbin")  # links into /usr, as in Debian


def setup(root: Path, python: Python, *, wheels: Path | None, inject: Iterable[str]) -> list[list[str]]:
    """The commands that build it at `root`; they run in the container's mount namespace."""
    at = str(root)
    dash = shutil.which("dash") or "/bin/sh"
    tools = [found for tool in TOOLS if (found := shutil.which(tool, path="/usr/bin:/bin")) is not None]
    files = [*tools, *_libraries([python.exe, *_modules(python), *tools, dash])]
    files += [path for path in ETC if Path(path).exists()]
    files = sorted({_in_its_folder(path) for path in files if not path.startswith(python.prefix)})
    script = [
        ["mount", "-t", "tmpfs", "-o", "mode=755", "container", at],
        ["mkdir", "-p", *(f"{at}/{name}" for name in FOLDERS.split())],
        ["chmod", "1777", f"{at}/tmp", f"{at}/var/tmp", f"{at}/dev/shm"],
        *(["ln", "-s", f"usr/{name}", f"{at}/{name}"] for name in MERGED),
        ["cp", "-L", "--parents", *files, at],
        ["cp", "-L", dash, f"{at}/usr/bin/dash"],
        ["ln", "-s", "dash", f"{at}/usr/bin/sh"],
        ["sh", "-c", f"printf '127.0.0.1 localhost\\n' > {at}/etc/hosts"],
    ]
    for name in DEVICES:
        script += [["touch", f"{at}/dev/{name}"], ["mount", "--bind", f"/dev/{name}", f"{at}/dev/{name}"]]
    script.append(["ln", "-s", "/proc/self/fd", f"{at}/dev/fd"])
    script += _python(at, python)
    if wheels is not None:
        script += _bound(at, str(wheels), "/wheels")
    for path in inject:
        script += _bound(at, path, path)
    return script


def _python(at: str, python: Python) -> list[list[str]]:
    """The installation under its own path, writable on top, with its commands in /usr/local/bin as in the image."""
    prefix, over = f"{at}{python.prefix}", f"{at}/run/python"
    script = [
        ["mkdir", "-p", prefix, f"{over}/upper", f"{over}/work"],
        ["mount", "-t", "overlay", "python", "-o",
         f"lowerdir={python.prefix},upperdir={over}/upper,workdir={over}/work", prefix],
    ]  # fmt: skip
    for name in ("python", "python3", f"python{python.version}"):
        script.append(["ln", "-sf", python.exe, f"{at}/usr/local/bin/{name}"])
    pip = f"exec {python.exe} -m pip"
    script.append(["sh", "-c", f"printf '#!/bin/sh\\n%s \"$@\"\\n' '{pip}' > {at}/usr/local/bin/pip"])
    script.append(["chmod", "755", f"{at}/usr/local/bin/pip"])
    return script


def _in_its_folder(path: str) -> str:
    """The path with its folder's links resolved, so that each file has one name."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _bound(at: str, path: str, to: str) -> list[list[str]]:
    if Path(path).is_dir():
        make = [["mkdir", "-p", f"{at}{to}"]]
    else:
        make = [["mkdir", "-p", str(Path(f"{at}{to}").parent)], ["touch", f"{at}{to}"]]
    return [*make, ["mount", "--bind", path, f"{at}{to}"]]


def _modules(python: Python) -> list[str]:
    dynload = Path(python.prefix) / "lib" / f"python{python.version}" / "lib-dynload"
    return [str(path) for path in sorted(dynload.glob("*.so")) if "test" not in path.name]


def _libraries(programs: list[str]) -> list[str]:
    found = set(_linked(tuple(programs)))
    folders = {str(Path(path).parent) for path in found}
    return sorted(
        found | {f"{folder}/{name}" for folder in folders for name in LIBRARIES if Path(folder, name).exists()}
    )


@lru_cache(maxsize=8)
def _linked(programs: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of the shared libraries that the programs load, the loader too."""
    out = subprocess.run(["ldd", *programs], capture_output=True, text=True, timeout=60).stdout
    return tuple(sorted(set(re.findall(r"(/\S+\.so\S*)(?= \(0x)", out))))
