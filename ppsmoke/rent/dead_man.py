"""The dead-man: a process of its own in a rented container, which ends the rental when nobody else does.

Its source travels in the start command (boot.py): standard library alone, nothing of ours, and short. It holds the
container's own key, which can start, stop and destroy this one instance and nothing else. It knows no node and no
orchestrator, only a lifetime, and a file that somebody touches whenever the orchestrator is heard.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from urllib.error import HTTPError
from urllib.request import Request, urlopen

LIFETIME_S = 900  # where the environment holds no usable number: a typing error must not rent for ever
SILENCE_S = 120  # issue 3: so long without the orchestrator, once it was heard, means that it is gone
RETRY_S = 4  # the API wants 3 s between two destroys; doubled after each refusal, to 16 times this
EXCHANGE_S = 30  # one DELETE and its answer


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """A duration from the environment; what is no number between 0 and a day is the default."""
    try:
        value = float(environ["PPSMOKE_NODE_" + name])
    except (KeyError, ValueError):
        value = 0
    return value if 0 < value <= 86400 else default


class Vigil:
    """When to end. Pure: clocks (seconds since the host's start, and since 1970) and the heartbeat's mark go in."""

    def __init__(self, ends: Sequence[float], silence: float) -> None:
        self.ends, self.silence, self.mark, self.heard = ends, silence, 0, 0.0

    def over(self, clocks: Sequence[float], mark: int) -> str:
        """Why it is time to end, "" while it is not. mark changes when the file is touched; 0: there is no file."""
        if mark and mark != self.mark:
            self.mark, self.heard = mark, clocks[0]
        if clocks[0] >= self.ends[0] or clocks[1] >= self.ends[1]:
            return "lifetime over"
        return "orchestrator silent" if self.mark and clocks[0] - self.heard >= self.silence else ""


def lifetime_ends(folder: str, clocks: Sequence[float], lifetime: float) -> list[float]:
    """Where the lifetime ends on either clock. Kept in a file: a container that starts again gets no new lifetime."""
    ends, path = [now + lifetime for now in clocks], folder + "/lifetime"
    try:
        with open(path) as file:
            return [min(float(file.readline()), end) for end in ends]
    except (OSError, ValueError):
        pass  # there is none, or none that can be read
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path + "r", "w") as file:
            for end in ends:
                print(end, file=file)
        os.replace(path + "r", path)  # whole or not at all: we may be killed here, and another one armed
    except OSError as error:
        say(error)
    return ends


def judge(status: int, body: bytes) -> str:
    """What the answer to a DELETE means: "gone", "asked" (taken, not yet done) or "again". The body comes first: a 404
    also comes with a wrong key, and from whatever else may stand in the way."""
    if b"no_such_instance" in body or b'"not_found"' in body:
        return "gone"
    return "asked" if status == 200 and b"true" in body else "again"


def ask(url: str, key: str) -> tuple[int, bytes]:
    """DELETE our own instance: (status, body), or (0, what went wrong) where there is no answer. Follows no redirect
    (urllib follows none for this method); takes EXCHANGE_S at most, a stuck name server apart."""
    headers = {"Authorization": "Bearer " + key, "User-Agent": "ppsmoke"}
    try:
        signal.alarm(EXCHANGE_S)
        try:
            reply = urlopen(Request(url, headers=headers, method="DELETE"))
        except HTTPError as error:
            reply = error
        return reply.status, reply.read(9999)
    except (Exception, KeyboardInterrupt) as error:  # a name server, TLS, a cut reply, the alarm: once more
        return 0, repr(error).encode()
    finally:
        signal.alarm(0)


def say(text: object) -> None:
    try:
        print("ppsmoke dead-man:", text, flush=True)
    except OSError:
        pass


def clocks() -> tuple[float, float]:
    """Seconds since the host's start, time asleep included, and since 1970."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), time.time()


def mark_of(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def main(environ: Mapping[str, str] = os.environ) -> None:
    """Watch, then ask for the end until the API says that the instance is gone (being alive after a 200 means asking
    again). Without a key it can only say so; it stays, as its end would mean that the instance is gone."""
    key, instance = environ.get("CONTAINER_API_KEY"), environ.get("CONTAINER_ID")
    if not key or not instance:
        say("no CONTAINER_API_KEY or CONTAINER_ID: this machine cannot end itself")
        while True:
            time.sleep(999)
    lifetime, silence = seconds(environ, "LIFETIME_S", LIFETIME_S), seconds(environ, "SILENCE_S", SILENCE_S)
    folder = environ["PPSMOKE_NODE_DIR"]
    vigil = Vigil(lifetime_ends(folder, clocks(), lifetime), silence)
    say(f"armed: {lifetime} s, {silence} s of silence")
    while not (reason := vigil.over(clocks(), mark_of(folder + "/heartbeat"))):
        time.sleep(min(1, lifetime / 8, silence / 8))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    wait = retry = seconds(environ, "RETRY_S", RETRY_S)
    url = (environ.get("VAST_URL") or "https://console.vast.ai").rstrip("/") + f"/api/v0/instances/{instance}/"
    while True:
        say(f"{reason}: DELETE {url}")
        status, body = ask(url, key)
        say(f"{status} {body[:200]}")
        verdict = judge(status, body)
        if verdict == "gone":
            return
        time.sleep(16 * retry if verdict == "asked" else wait)
        wait = min(2 * wait, 16 * retry)


if __name__ == "__main__":
    main()
