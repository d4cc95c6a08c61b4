"""What process 1 of a rented container does once the code is here: see pip through, run the node, tell how it goes.

It runs inside process_one.py, out of the pushed code, on the standard library alone. The port is ours until all is
installed, then the node's, and ours again when the node has ended: whoever watches is told how it ended, and another
push, of the same code or of newer code, starts it again. While a node runs there is nothing to push to.

Wire, after both proofs: records (4 bytes of length, JSON, a proof over nonces, header and the record's number) until
one is final or WATCH_S have passed; then the watcher comes again, which shows the dead-man that it lives.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ppsmoke.package import own_command
from ppsmoke.rent.process_one import ProcessOne, proof, receive, say

PUSH, WATCH = b"P", b"W"
FINAL = ("starting", "failed", "ended")
WATCH_S = 20.0
TICK_S = 2.0  # a record is sent so often even if nothing is new
TAIL_BYTES = 2000
PIP_TRIES = 3
PIP_TRY_S = 120.0
PIP_LOOK_S = 0.5
SEND_S = 10.0  # for one record
LAST_OUTPUT_S = 0.5  # longer is not waited for: what a node started may hold its output open
LIKELY_VICTIM = "500"  # oom_score_adj: where memory runs out, the node goes before the dead-man
SECRETS = ("PPSMOKE_NODE_SECRET", "CONTAINER_API_KEY")  # ours and the dead-man's, not the node's


class SecondStage:
    """The rest of a container's life. One thread installs, one conducts (the caller's), and each watcher has one."""

    def __init__(self, one: ProcessOne) -> None:
        self._one = one
        self._changed = one.changed  # guards all below; also rung when a child ends
        self._payload: tuple[bytes, str] | None = None  # and its digest, hex
        self._installed = False
        self._watchers = 0
        self._news = 0
        armed = one.environ.get("CONTAINER_API_KEY") and one.environ.get("CONTAINER_ID")
        self._status = {
            "state": "accepted",
            "python": sys.version.split()[0],
            "dead_man": "armed" if armed else "no key in the container",
            "pip_try": 0,
            "pip_s": 0.0,
            "exit": None,
            "tail": "",
        }

    def run(self, peer: socket.socket, secret: bytes, about: bytes, payload: bytes) -> None:
        """Take over from the first stage with the payload it received. Does not return."""
        self._payload = payload, about[73:].hex()
        self._one.welcome = self.welcome
        threading.Thread(target=self._install).start()
        threading.Thread(target=self._watch_and_close, args=(peer, secret, about)).start()
        while True:
            try:
                self._conduct()
            except Exception as error:  # a full disk, no memory: told, and the next push may fare better
                self._tell(state="ended", exit=None, tail=repr(error))

    def welcome(self, peer: socket.socket, secret: bytes, about: bytes) -> None:
        """A peer that has proven itself, from here on instead of the first stage's."""
        if about[64:65] == PUSH:
            payload = receive(peer, about)
            with self._changed:
                self._payload = payload, about[73:].hex()
                if self._status["state"] != "failed":
                    self._tell(state="accepted")
        self._watch(peer, secret, about)

    def _conduct(self) -> None:
        """Listen until there is a payload and all is installed; then the node has the port until it ends."""
        threading.Thread(target=self._one.listen).start()
        with self._changed:
            self._changed.wait_for(lambda: self._payload and self._installed)
            (payload, digest), self._payload = self._payload, None
        command, environ = self._unpack(payload, digest)
        with self._changed:
            self._tell(state="starting")
            self._changed.wait_for(lambda: not self._watchers, TICK_S)
        while not self._one.close():
            time.sleep(0.05)  # the listener is only just coming up
        code = self._run_node(command, environ)
        say(f"the node ended with status {code}")
        self._tell(state="ended", exit=code)

    def _unpack(self, payload: bytes, digest: str) -> tuple[list[str], dict[str, str]]:
        """Write the payload's parts; the node's command and environment. No code in it: the code that is here."""
        size = int.from_bytes(payload[:4], "big")
        certificates, code = payload[4 : 4 + size], payload[4 + size :]
        if code:
            command = [sys.executable, self._write(f"{digest}.pyz", code), "node"]
            environ = {}
        else:
            own, environ = own_command()
            command = [*own, "node"]
        environ.update((name, value) for name, value in self._one.environ.items() if name not in SECRETS)
        environ["PPSMOKE_NODE_CERTS"] = self._write("certificates.json", certificates)
        environ["PPSMOKE_NODE_HEARTBEAT"] = f"{self._one.folder}/heartbeat"
        environ["PYTHONUNBUFFERED"] = "1"
        with suppress(KeyError, ValueError):  # a lifetime counts from the start command
            left = float(environ["PPSMOKE_NODE_LIFETIME_S"]) - (time.monotonic() - self._one.started)
            environ["PPSMOKE_NODE_LIFETIME_S"] = f"{max(1.0, left):.0f}"
        return command, environ

    def _write(self, name: str, data: bytes) -> str:
        """A file whole or not at all: a running zipapp is never changed, as its name is its digest."""
        path = f"{self._one.folder}/{name}"
        with open(f"{path}.part", "wb") as file:
            file.write(data)
        os.replace(f"{path}.part", path)
        return path

    def _run_node(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """The node from start to end, its output passed on, and its last part told; its exit status."""
        self._tell(tail="")
        ours, theirs = os.pipe()
        copying = threading.Thread(target=self._copy, args=(ours,))
        copying.start()
        try:
            pid = self._one.spawn(command, environ, theirs)
        finally:
            os.close(theirs)
        with suppress(OSError):
            with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                file.write(LIKELY_VICTIM)
        code = self._ending(pid)
        copying.join(LAST_OUTPUT_S)
        return code

    def _copy(self, source: int) -> None:
        tail = b""
        while data := os.read(source, 1 << 16):
            with suppress(OSError):
                os.write(1, data)
            tail = (tail + data)[-TAIL_BYTES:]
            self._tell(tail=tail.decode("utf-8", "replace"))
        os.close(source)

    def _ending(self, pid: int, within_s: float | None = None) -> int | None:
        """A child's exit status, None if it still runs after within_s."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._one.ends, within_s)
            return self._one.ends.get(pid)

    def _install(self) -> None:
        """See pip through, in up to three tries. A baked image has nothing to install."""
        code, shown, tries = (1, 0, PIP_TRIES) if self._one.packages else (0, 0, 0)
        for attempt in range(1, tries + 1):
            self._tell(pip_try=attempt)
            pid = self._one.pip if attempt == 1 else self._one.install()
            until, code = time.monotonic() + PIP_TRY_S, None
            while code is None:
                code = self._ending(pid, PIP_LOOK_S)
                shown = self._show_log(shown)
                if code is None and time.monotonic() > until:
                    with suppress(OSError):
                        os.killpg(pid, 9)
            say(f"pip ended with status {code} ({attempt} of {tries} tries)")
            if code == 0:
                break
        with self._changed:
            self._installed = code == 0
            self._tell(pip_s=round(time.monotonic() - self._one.started, 3))
            if code != 0:
                self._tell(state="failed", exit=code)

    def _show_log(self, shown: int) -> int:
        """Pass on what pip has written since `shown` bytes; how much that is now."""
        with suppress(OSError), open(f"{self._one.folder}/pip.log", "rb") as file:
            file.seek(shown)
            if data := file.read():
                with suppress(OSError):
                    os.write(1, data)
                file.seek(max(0, shown + len(data) - TAIL_BYTES))
                self._tell(tail=file.read().decode("utf-8", "replace"))
                return shown + len(data)
        return shown

    def _tell(self, **news: object) -> None:
        with self._changed:
            self._status.update(news)
            self._news += 1
            self._changed.notify_all()

    def _watch_and_close(self, peer: socket.socket, secret: bytes, about: bytes) -> None:
        with peer, suppress(OSError):
            self._watch(peer, secret, about)

    def _watch(self, peer: socket.socket, secret: bytes, about: bytes) -> None:
        """Send records. Each is proven, so that nobody on the way can invent or repeat one."""
        with self._changed:
            self._watchers += 1
        try:
            peer.settimeout(SEND_S)
            until, number, seen = time.monotonic() + WATCH_S, 0, -1
            while True:
                with self._changed:
                    if self._news == seen:
                        self._changed.wait(TICK_S)
                    seen = self._news
                    record = {**self._status, "dead_man_restarts": self._one.arms - 1}
                text = json.dumps(record).encode()
                told = proof(secret, b"told", about + number.to_bytes(4, "big") + text)
                peer.sendall(len(text).to_bytes(4, "big") + text + told)
                number += 1
                if record["state"] in FINAL or time.monotonic() > until:
                    return
        finally:
            with self._changed:
                self._watchers -= 1
                self._changed.notify_all()
