"""Runs first in each Python of a container that loads its site: a pip or a node stands still while its hold is there.

make_home copies it into the container's own environment, whose folder the fake puts the holds into (containers.py).
"""

from __future__ import annotations

import os
import sys
import time

LOOK_S = 0.01


def name_of(command: list[str]) -> str:
    """ "pip", "node", or "" for what is never held."""
    if command[1:3] == ["-m", "pip"]:
        return "pip"
    return "node" if command[-1] == "node" else ""


def wait(folder: str, name: str) -> None:
    while name and os.path.exists(f"{folder}/hold-{name}"):
        time.sleep(LOOK_S)


if __name__ == "lab_held":
    # <the container's folder>/venv/lib/python3.x/site-packages/lab_held.py
    wait(os.path.abspath(f"{os.path.dirname(__file__)}/../../../.."), name_of(sys.orig_argv))
