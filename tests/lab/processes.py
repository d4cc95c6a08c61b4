"""What tests of processes ask: is this pid still there, and wait until it is not."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie has ended: whether its parent has reaped it is the parent's affair."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def until(condition: Callable[[], bool], *, within_s: float) -> float:
    """Seconds until the condition held. Raises TimeoutError when it did not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"still not so after {within_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - began


def group_is_empty(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return True
    listed = subprocess.run(["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True).stdout.split("\n")
    return not any(line.split()[0] == str(pgid) and "Z" not in line for line in listed if line.strip())
