"""Which processes a run has, told by a marker in their environment: found and counted through /proc (Linux)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A living process (no zombie) as /proc shows it."""

    pid: int
    parent: int
    command: str

    @property
    def kind(self) -> str:
        """orchestrator, node, worker, tracker, or other (a compiler, pip)."""
        if "resource_tracker" in self.command:
            return "tracker"
        if "multiprocessing" in self.command:
            return "worker"
        words = self.command.split()
        if "ppsmoke" in self.command and words[-1:] == ["node"]:
            return "node"
        return "orchestrator" if "ppsmoke" in self.command else "other"


def marked(marker: str) -> list[Process]:
    """Every living process whose initial environment holds the marker (a unique folder's path), by pid."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in (entry / "environ").read_bytes():
                    state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                    if state not in "ZX":
                        found.append(Process(int(entry.name), int(parent), command))
    return sorted(found, key=lambda process: process.pid)
