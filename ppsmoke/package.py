"""Our own code as data: its hash, which both ends of a link compare, and the zipapp, one file that runs anywhere."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from ppsmoke import __version__

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold; fixed, so that the same code gives the same bytes
BUILD_FILE = "ppsmoke/build.json"


def source_files() -> list[tuple[str, bytes]]:
    """Every Python file of this package as (path below its parent, bytes), sorted; from a folder or a zipapp alike."""

    def walk(folder, path: str) -> Iterator[tuple[str, bytes]]:
        for entry in folder.iterdir():
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from walk(entry, f"{path}/{entry.name}")
            elif entry.name.endswith(".py"):
                yield f"{path}/{entry.name}", entry.read_bytes()

    return sorted(walk(resources.files("ppsmoke"), "ppsmoke"))


def own_command() -> tuple[list[str], dict[str, str]]:
    """How to start ourselves again: the command's first words, and the environment variables that it needs."""
    above = Path(__file__).resolve().parent.parent
    if above.is_file():  # a zipapp: it is its own folder
        return [sys.executable, str(above)], {}
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [sys.executable, "-m", "ppsmoke"], {"PYTHONPATH": os.pathsep.join([str(above), *inherited])}


@functools.cache
def code_hash() -> str:
    """SHA-256 of our source, hex; the same for a checkout, an installed package and a zipapp of the same code."""
    digest = hashlib.sha256()
    for path, data in source_files():
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def build_zipapp(commit: str) -> bytes:
    """The bytes of a runnable zip: same source and commit, same bytes (no clock, no order of a file system)."""
    main = b"import sys\nfrom ppsmoke.__main__ import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
    build = json.dumps({"version": __version__, "commit": commit, "code": code_hash()}, sort_keys=True).encode()
    buffer = io.BytesIO(b"")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, data in sorted([("__main__.py", main), (BUILD_FILE, build), *source_files()]):
            info = zipfile.ZipInfo(path, _EPOCH)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return b"#!/usr/bin/env python3\n" + buffer.getvalue()


def write_zipapp(target: Path, commit: str) -> int:
    """Write the zipapp whole or not at all; the number of bytes. A running file is never overwritten in place.

    Raises OSError, also for what is there and is no regular file: a device would be replaced by ours."""
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        raise OSError(errno.EEXIST, "it exists and is no regular file")
    data = build_zipapp(commit)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        partial.chmod(0o755)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return len(data)


def built_from() -> dict[str, str]:
    """What a zipapp says of itself: version, commit, code; a checkout or an installed package knows its version."""
    try:
        return json.loads((resources.files("ppsmoke") / "build.json").read_bytes())
    except (OSError, ValueError):
        return {"version": __version__, "commit": ""}
