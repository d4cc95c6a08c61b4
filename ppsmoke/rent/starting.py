"""How a rented host comes up, read from what the account shows of it: up, not yet, or bad and why. Pure.

The states and texts are those of facts/vastai-api.md, sections 4 and 10.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ppsmoke.rent.boot import TCP_PORT, UDP_PORT
from ppsmoke.rent.ending import NEW_S
from ppsmoke.rent.shapes import Instance

STALL_SLACK_S = 45.0  # design, phase rent: beyond the predicted pull, without any change
NO_PORT_S = 60.0  # issue 3: running without a port that could make a link
EXITED_LOOKS = 3  # a restart shows `exited` for a while, and so does a stale status
AWAY_LOOKS = 2  # one missed heartbeat is no loss
# What a host says when it will never start this container, and whether another one might.
_NEVER_STARTS: tuple[tuple[str, str, bool], ...] = (
    (
        r"cdi devices|nvidia-container-cli|could not select device driver",
        "its GPU cannot be given to a container",
        True,
    ),
    (r"toomanyrequests|rate limit", "the image registry limits its pulls", True),
    (r"manifest.{0,80}(unknown|not found)|manifest unknown", "the image has no such tag", False),
    (
        r"pull access denied|repository does not exist|unauthorized|authentication required",
        "the image is denied",
        False,
    ),
    (r"no space left on device", "its disk is full", True),
    (r"exec: .*(no such file|not found|permission denied)", "the image lacks the start command's program", False),
    (r"runtime create failed|error response from daemon", "its container could not be made", True),
)


@dataclass(frozen=True)
class Up:
    """It runs, and its mapped ports are known; udp_port None: membership goes over the link."""

    address: str
    tcp_port: int
    udp_port: int | None


@dataclass(frozen=True)
class Bad:
    """It will not come up. another: may another host fare better, or is it the image, the request, the account?"""

    why: str
    another: Literal["may help", "is futile"] = "may help"


class Starting:
    """One instance from its create on. Times are seconds of one monotonic clock."""

    def __init__(self, *, made_at: float, pull_s: float) -> None:
        self._made_at = made_at
        self._pull_s = pull_s
        self._shape: tuple[object, ...] = ()
        self._changed_at = made_at
        self._running_since: float | None = None
        self._seen = False
        self._absent = self._exited = self._away = 0

    def see(self, instance: Instance | None, now: float) -> Up | Bad | None:
        """What a complete list of the account showed of it. None: not yet."""
        if instance is None:
            return self._missing(now)
        self._seen, self._absent = True, 0
        shape = (instance.actual_status, instance.status_msg, instance.disk_used_gb, instance.cur_state)
        if shape != self._shape:
            self._shape, self._changed_at = shape, now
        if instance.is_bid:
            return Bad("the service made it an interruptible bid", "is futile")
        if instance.actual_status == "running" and instance.cur_state != "stopped":
            return self._running(instance, now)
        return self._not_running(instance, now)

    def _missing(self, now: float) -> Bad | None:
        self._absent += 1
        if self._seen and self._absent >= AWAY_LOOKS:
            return Bad("it has vanished from the account")
        if not self._seen and now - self._made_at >= NEW_S:
            return Bad(f"it has not appeared on the account in {NEW_S:.0f} s")
        return None

    def _running(self, instance: Instance, now: float) -> Up | Bad | None:
        self._exited = self._away = 0
        self._running_since = now if self._running_since is None else self._running_since
        tcp_port = instance.ports.get(f"{TCP_PORT}/tcp")
        if tcp_port is not None and instance.address:
            return Up(instance.address, tcp_port, instance.ports.get(f"{UDP_PORT}/udp"))
        if now - self._running_since >= NO_PORT_S:
            mapped = ", ".join(sorted(instance.ports)) or "none"
            return Bad(f"running for {NO_PORT_S:.0f} s without a port for {TCP_PORT}/tcp (mapped: {mapped})")
        return None

    def _not_running(self, instance: Instance, now: float) -> Bad | None:
        status = instance.actual_status or "provisioning"
        said = f": {instance.status_msg}" if instance.status_msg else ""
        for pattern, meaning, another in _NEVER_STARTS:
            if re.search(pattern, instance.status_msg, re.IGNORECASE):
                return Bad(f"{meaning}{said}", "may help" if another else "is futile")
        if instance.cur_state == "stopped" and instance.intended_status == "stopped":
            return Bad(f"stopped without our asking ({status}){said}")
        self._exited = self._exited + 1 if status in ("exited", "error", "destroyed", "terminated") else 0
        self._away = self._away + 1 if status in ("offline", "unknown") else 0
        if self._exited >= EXITED_LOOKS or self._away >= AWAY_LOOKS:
            return Bad(f"{status}{said}")
        patience_s = self._pull_s + STALL_SLACK_S
        if now - self._changed_at >= patience_s:
            return Bad(f"stalled: {status} without any change for {patience_s:.0f} s{said}")
        return None


def lost(instance: Instance | None) -> str:
    """Why a host that was up cannot go on, "" where it may: only what is definite counts, as a status alone may be
    stale while the host works; a link that falls silent is seen elsewhere."""
    if instance is None:
        return "its instance has vanished from the account"
    if instance.cur_state == "stopped" and instance.intended_status == "stopped":
        said = f": {instance.status_msg}" if instance.status_msg else ""
        return f"its instance was stopped without our asking (outbid, or the credit is spent){said}"
    if instance.unloading:
        return "its instance is being destroyed, and not by us"
    return ""
