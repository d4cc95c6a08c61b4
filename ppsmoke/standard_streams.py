"""File descriptors 0, 1 and 2 of a process of ours, open whatever it was started with. Open to every room."""

from __future__ import annotations

import os
import sys


def keep_standard_streams_open() -> None:
    """A process started without fd 0, 1 or 2 would give these numbers to a socket or its event loop, which its
    children then inherit, and print would write there. What is written to a stdout that was closed fails, as it must
    be seen to."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:  # the lowest free number is this one
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
