"""Where a stage computes: the choice between CPU and CUDA, and what each needs, checked before tinygrad is imported.

tinygrad reads its environment once, at import: prepare() must come first. Imports neither tinygrad nor numpy.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from ppsmoke.errors import EnvironmentLacks
from ppsmoke.worker.fetch import cache_dir

DEVICES = ("CPU", "CUDA")
MIN_PYTHON = (3, 11)  # tinygrad 0.12.0
TINYGRAD = "tinygrad==0.12.0"
# tinygrad looks in a few folders only and never at LD_LIBRARY_PATH; containers mount the driver elsewhere.
LIBCUDA_FOLDERS = (
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/lib64",
    "/lib",
    "/usr/lib/*-linux-gnu",
    "/lib/*-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
)


CACHE_ROOM_BYTES = 4 << 20  # kernels of a model take about one, its steps a few


def prepare(requested: str, environment: MutableMapping[str, str]) -> str:
    """Choose the device ("" chooses CUDA where a driver is, else the CPU) and set what tinygrad reads at import.

    Raises EnvironmentLacks with what to install.
    """
    _check_python()
    name, _, index = (requested or "").upper().partition(":")
    if name and (name not in DEVICES or (index and not index.isdecimal())):
        raise EnvironmentLacks(f"unknown device {requested!r}", hint=f"known: {', '.join(DEVICES)}")
    libcuda = _find_libcuda(environment) if name in ("", "CUDA") else None
    if name == "CUDA" and libcuda is None:
        raise EnvironmentLacks(
            "no NVIDIA driver in this container or machine (libcuda.so is not there)", hint="--device CPU computes too"
        )
    name = name or ("CUDA" if libcuda and _has_gpu() else "CPU")
    _check_modules()
    if name == "CUDA":
        environment["CUDA_PTX"] = "1"  # the driver compiles PTX: no toolkit and no clang is needed
        environment["CUDA_PATH"] = str(libcuda)
    else:
        _check_clang(environment)
    environment["CUDA" if name == "CUDA" else "CPU"] = "1"  # else tinygrad tries its NV device first, which fails
    _choose_kernel_cache(environment)
    return f"{name}:{index}" if index else name


def _check_python() -> None:
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        raise EnvironmentLacks(
            f"this is Python {platform.python_version()}; a stage that computes needs {wanted} or newer",
            hint=f"run it with a newer Python, for instance python{wanted} -m ppsmoke",
        )


def _check_modules() -> None:
    missing = [name for name in ("tinygrad", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentLacks(
            f"{' and '.join(missing)} cannot be imported by {sys.executable}",
            hint=f"{sys.executable} -m pip install {TINYGRAD} numpy",
        )


def _check_clang(environment: MutableMapping[str, str]) -> None:
    """tinygrad's CPU device compiles with clang, or with the clang that CC names; gcc does not know its options."""
    if "clang" not in os.path.basename(environment.get("CC", "")):
        environment.pop("CC", None)
    compiler = environment.get("CC") or "clang"
    if environment.get("CPU_LLVM") == "1" or shutil.which(compiler, path=environment.get("PATH")):
        return
    hint = "xcode-select --install" if sys.platform == "darwin" else "apt-get install clang"
    raise EnvironmentLacks(f"no {compiler} on the PATH; computing on the CPU needs clang", hint=hint)


def _find_libcuda(environment: MutableMapping[str, str]) -> Path | None:
    named = [environment["CUDA_PATH"]] if environment.get("CUDA_PATH") else []
    searched = [*environment.get("LD_LIBRARY_PATH", "").split(":"), *LIBCUDA_FOLDERS]
    for pattern in [*named, *filter(None, searched)]:
        for place in sorted(glob.glob(pattern)):
            for candidate in (Path(place), Path(place, "libcuda.so"), Path(place, "libcuda.so.1")):
                if candidate.is_file():
                    return candidate
    return None


def _has_gpu() -> bool:
    """A driver library alone is no GPU: images ship it too."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")


def _choose_kernel_cache(environment: MutableMapping[str, str]) -> None:
    """A kernel cache of this machine's own, in our cache; without one where it cannot be written.

    tinygrad's own is keyed by the source alone, and made for the compiling CPU alone: in a home shared by two kinds
    of machine it would run the other's instructions.
    """
    if "CACHEDB" in environment or "CACHELEVEL" in environment:
        return
    folder = cache_dir() / "kernels" / _machine_id(environment)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(CACHE_ROOM_BYTES))  # a full disk may still give an empty file
            file.flush()
    except OSError:
        environment["CACHELEVEL"] = "0"  # else tinygrad fails at its first kernel
        return
    environment["CACHEDB"] = str(folder / "cache.db")


def _machine_id(environment: MutableMapping[str, str]) -> str:
    """A short hash of the CPU and the compiler."""
    seen = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        seen += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    except OSError:
        pass
    if compiler := shutil.which(environment.get("CC") or "clang", path=environment.get("PATH")):
        found = os.stat(compiler)
        seen += [os.path.realpath(compiler), str(found.st_size), str(found.st_mtime_ns)]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
