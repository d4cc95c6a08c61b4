"""One instance as a pure timeline: phases with a start time, written when it is created and cut short by commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.lab.fake_vast.market import Offer

CREATED_S, LOADING_S, START_S = 2.0, 5.0, 3.0  # null until, created until; from the end of the pull to running
STRIKE_S = 20.0  # what befalls a running machine befalls it so long after running
CDI = "failed to inject CDI devices: unresolvable CDI devices D.{id}/gpu=0"
OCI = 'OCI runtime create failed: exec: "{command}": stat {command}: no such file or directory: unknown'
DENIED = (
    "Error response from daemon: pull access denied for {image}, repository does not exist or may require login: denied"
)
UNKNOWN_TAG = "Error response from daemon: manifest for {image} not found: manifest unknown: manifest unknown"
PULL_LIMIT = "toomanyrequests: You have reached your pull rate limit."


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From `at` (epoch seconds) on, until the next phase begins."""

    at: float
    status: str | None  # actual_status
    msg: str = ""
    ports: bool = False  # are the mapped ports shown?
    serving: bool = False  # does the container run?
    reachable: bool = True  # do its mapped ports lead to it?
    cur: str = "running"
    intended: str = "running"
    shown: bool = True  # False: reads answer null although nobody destroyed it


@dataclass
class Instance:
    """What was rented, for whom, and its phases. `now` is an argument everywhere."""

    id: int
    offer: Offer
    dph_gpu: float
    body: dict[str, Any]
    created_at: float
    api_key: str
    image_gb: float
    phases: list[Phase]
    script: str = ""
    is_bid: bool = False
    ports: dict[str, int] = field(default_factory=dict)  # "7070/tcp" -> port on the public address
    address: str = "127.0.0.1"
    destroyed_at: float | None = None
    linger_reads: int = 0  # after a destroy: so many reads still show it, unloaded
    invisible_reads: int = 0  # after a create: so many reads do not show it yet
    ours: bool = True  # False: a foreign instance that was there before

    @property
    def label(self) -> str | None:
        return self.body.get("label")

    @property
    def disk_gb(self) -> float:
        return float(self.body.get("disk") or 10.0)

    @property
    def is_live(self) -> bool:
        return self.destroyed_at is None

    def phase(self, now: float) -> Phase:
        current = self.phases[0]
        for candidate in self.phases:
            if candidate.at <= now:
                current = candidate
        return current

    def next_change(self, now: float) -> float | None:
        """When its next phase begins; None if nothing is due."""
        return min((phase.at for phase in self.phases if phase.at > now), default=None)

    def cut(self, now: float, **changes: Any) -> None:
        """Drop what was to come; the phase of now goes on with `changes`."""
        current = self.phase(now)
        self.phases = [phase for phase in self.phases if phase.at <= now] + [replace(current, at=now, **changes)]

    def stop(self, now: float, msg: str = "") -> None:
        self.cut(now, status="stopped", cur="stopped", intended="stopped", serving=False, ports=False, msg=msg)

    def start(self, now: float, *, after_s: float) -> None:
        """Running again `after_s` from now; until then it stays stopped."""
        running = Phase(at=now + after_s, status="running", msg=_success(self.body), ports=True, serving=True)
        self.phases = [phase for phase in self.phases if phase.at <= now] + [running]

    def exited(self, now: float, status: int) -> None:
        """Its start command ended by itself."""
        self.cut(now, status="exited", serving=False, ports=False, msg=f"container exited with status {status}")

    def strike(self, name: str, now: float) -> None:
        """What befalls a running machine, now: offline, unknown, outbid, credit-stop, vanish, false-exited."""
        strike = STRIKES[name]
        self.cut(now, **strike)
        if name == "false-exited":
            self.phases.append(replace(self.phase(now), at=now + 30.0, status="running", msg=_success(self.body)))

    def destroy(self, now: float, *, linger_reads: int) -> None:
        if self.is_live:
            self.destroyed_at, self.linger_reads = now, linger_reads

    def serving_since(self, now: float) -> float | None:
        """When the container that runs now was started; None if none should run. A stop and a start make another."""
        since = None
        for phase in self.phases if self.is_live else ():
            if phase.at <= now:
                since = (phase.at if since is None else since) if phase.serving else None
        return since


STRIKES: dict[str, dict[str, Any]] = {
    "offline": {"status": "offline", "serving": False, "reachable": False},
    "unknown": {"status": "unknown", "serving": False, "reachable": False},
    "outbid": {"status": "stopped", "cur": "stopped", "intended": "stopped", "serving": False, "ports": False},
    "credit-stop": {"status": "stopped", "cur": "stopped", "intended": "stopped", "serving": False, "ports": False},
    "vanish": {"shown": False, "serving": False},
    "false-exited": {"status": "exited"},
}


def timeline(script: str, body: dict[str, Any], offer: Offer, *, now: float, image_gb: float) -> list[Phase]:
    """The phases of an instance created now, on a machine that behaves as `script` says ("" is well)."""
    pull_s = image_gb * 8000.0 / float(offer.row["inet_down"] or 100.0)
    phases = _healthy(body, now=now, pull_s=pull_s * (20.0 if script == "slow-pull" else 1.0))
    if script in _SCRIPTS:
        return _SCRIPTS[script](phases, {"id": offer.row["machine_id"], **_words(body)})
    if script in STRIKES:
        last = phases[-1]
        struck = replace(last, at=last.at + STRIKE_S, **STRIKES[script])
        back = replace(last, at=struck.at + 30.0)
        return [*phases, struck, back] if script == "false-exited" else [*phases, struck]
    return phases


def _healthy(body: dict[str, Any], *, now: float, pull_s: float) -> list[Phase]:
    image = str(body.get("image"))
    loading_at = now + LOADING_S
    layers = [f"{image.rpartition(':')[2]}: Pulling from {image.partition(':')[0]}"]
    layers += [f"{digest:012x}: {what}" for what in ("Pulling fs layer", "Verifying Checksum", "Pull complete")
               for digest in (0x3DA95A905ED5, 0x9B6C20F7D5EA)]  # fmt: skip
    step_s = (pull_s + START_S) / len(layers)
    pulls = [Phase(at=loading_at + index * step_s, status="loading", msg=layer) for index, layer in enumerate(layers)]
    running = Phase(at=loading_at + pull_s + START_S, status="running", msg=_success(body), ports=True, serving=True)
    return [Phase(at=now, status=None), Phase(at=now + CREATED_S, status="created"), *pulls, running]


def _success(body: dict[str, Any]) -> str:
    return f"success, running {body.get('image')}/{body.get('runtype')}\n"


def _words(body: dict[str, Any]) -> dict[str, str]:
    return {"image": str(body.get("image")), "command": str(body.get("onstart") or "")}


def _never_started(text: str) -> Callable[[list[Phase], dict[str, Any]], list[Phase]]:
    """The host failed to start the container: created, stopped, the reason in status_msg."""

    def script(phases: list[Phase], words: dict[str, Any]) -> list[Phase]:
        msg = text.format(**words)
        failed = Phase(at=phases[-1].at, status="created", cur="stopped", intended="stopped", msg=msg)
        return [*phases[:-1], failed]

    return script


def _frozen_at(status: str | None, text: str = "") -> Callable[[list[Phase], dict[str, Any]], list[Phase]]:
    """Up to the first phase of this status, and no further; `text` becomes its message."""

    def script(phases: list[Phase], words: dict[str, Any]) -> list[Phase]:
        index = next(index for index, phase in enumerate(phases) if phase.status == status)
        last = replace(phases[index], msg=text.format(**words) or phases[index].msg)
        return [*phases[:index], last]

    return script


def _running_but(**changes: Any) -> Callable[[list[Phase], dict[str, Any]], list[Phase]]:
    return lambda phases, words: [*phases[:-1], replace(phases[-1], **changes)]


def _late(phases: list[Phase], words: dict[str, Any]) -> list[Phase]:
    serving = replace(phases[-1], status="loading", msg=phases[-2].msg, ports=False)
    return [*phases[:-1], serving, replace(phases[-1], at=phases[-1].at + 60.0)]


_SCRIPTS: dict[str, Callable[[list[Phase], dict[str, Any]], list[Phase]]] = {
    "cdi": _never_started(CDI),
    "oci": _never_started(OCI),
    "pull-denied": _frozen_at("loading", DENIED),
    "manifest-unknown": _frozen_at("created", UNKNOWN_TAG),
    "registry-limit": _frozen_at("loading", PULL_LIMIT),
    "stuck-null": _frozen_at(None),
    "stuck-loading": _frozen_at("loading"),
    "exited": _running_but(status="exited", serving=False, ports=False, msg="container exited with status 1"),
    "no-ports": _running_but(ports=False, reachable=False),
    "refusing": _running_but(serving=False, reachable=False),
    "late-running": _late,
}
