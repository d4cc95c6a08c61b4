"""Running our own command line as a person would: a fresh process, its own folders, everything it said."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppsmoke.package import own_command

BUDGET_S = 240.0  # for one command, compiling on two busy cores included


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    @property
    def error_lines(self) -> list[str]:
        """What it said of its failure: from the line that begins with its name on."""
        lines = self.stderr.splitlines()
        start = next((i for i, line in enumerate(lines) if line.startswith(("ppsmoke: ", "usage: "))), len(lines))
        return lines[start:]


def ppsmoke(
    *arguments: str,
    home: Path,
    stdin: str | bytes = b"",
    environment: dict[str, str] | None = None,
    within_s: float = BUDGET_S,
) -> Said:
    """`python -m ppsmoke ARGUMENTS` with state and temporary files below `home`; the kernel cache is the user's."""
    command, more = own_command()
    tmp = home / "tmp"
    tmp.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PPSMOKE")}
    full = inherited | more | {"XDG_STATE_HOME": str(home / "state"), "TMPDIR": str(tmp)} | (environment or {})
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*command, *arguments], input=data, capture_output=True, env=full, timeout=within_s)
    return Said(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))
