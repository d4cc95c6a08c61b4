"""Process 1 of a rented container: it arms the dead-man, starts pip, and lets nobody in but its run's orchestrator.

Its source travels in the start command (boot.py): standard library alone, nothing of ours, and short. What comes after
the code is here (second_stage.py) is part of that code, and runs in this process: it never becomes the node and never
ends before the dead-man, whose end (and with it the rental's) would be lost.

Both sides prove the stage's secret over two fresh nonces, each in its own role. Numbers are big-endian. We send MAGIC
and a nonce; the peer sends a header (its nonce, PUSH or WATCH, size, SHA-256) and its proof, then we send ours. Nothing
more is read before that. After PUSH comes the payload (4 bytes: the length of what follows; certificates; zipapp), and
nothing runs before its digest is right. What we then tell the peer is described in second_stage.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

MAGIC = b"ppsmoke boot 1"
HEADER_BYTES = 73  # nonce 32, kind 1, size 8, SHA-256 32
MAX_PAYLOAD_BYTES = 4 << 20
HELLO_S = 10  # from accepting a peer to its proof; whoever drips bytes gets no longer
BODY_S = 60  # for a proven peer's payload: 4 MiB at 0.6 Mbit/s
MAX_PEERS = 32  # that have proven nothing yet; one more, and the oldest is dropped
# Bytecode is made where it is needed, which is 5 s of processor time less; asking for a newer pip takes 1.5 s more.
PIP = "-m pip install --no-input --no-compile --only-binary=:all: --progress-bar=off --disable-pip-version-check"


def say(text: object) -> None:
    try:
        print("ppsmoke boot:", text, flush=True)
    except OSError:
        pass


def proof(secret: bytes, role: bytes, about: bytes) -> bytes:
    """What only a holder of the secret can say, in this role (4 bytes), of both nonces and what follows them."""
    return hmac.digest(secret, MAGIC + role + about, "sha256")


def read(peer: socket.socket, size: int, within: float) -> bytes:
    """Exactly size bytes. The time is for all of them together: a timeout per piece would favour slow peers."""
    end, data = time.monotonic() + within, b""
    while len(data) < size:
        peer.settimeout(max(0.01, end - time.monotonic()))
        piece = peer.recv(size - len(data))
        if not piece:
            raise OSError("cut off")
        data += piece
    return data


def receive(peer: socket.socket, about: bytes) -> bytes:
    """The payload that a proven header announces. Raises OSError where it is not what was announced."""
    size = int.from_bytes(about[65:73], "big")
    if size > MAX_PAYLOAD_BYTES:
        raise OSError("too large")
    payload = read(peer, size, BODY_S)
    if hashlib.sha256(payload).digest() != about[73:]:
        raise OSError("wrong digest")
    return payload


class ProcessOne:
    """The container. The main thread arms and reaps; the thread of the peer that brings the code runs what is next."""

    def __init__(self, environ: Mapping[str, str], dead_man: str, packages: Sequence[str]) -> None:
        self.started = time.monotonic()
        self.environ, self.dead_man, self.packages = dict(environ), dead_man, packages
        folder = environ.get("TMPDIR", "/tmp") + "/ppsmoke-" + environ.get("CONTAINER_ID", "")
        self.folder = self.environ.setdefault("PPSMOKE_NODE_DIR", folder)
        self.changed = threading.Condition()
        self.children, self.ends = [], {}  # the pids of all that we started, the exit statuses of all that ended
        self.peers, self.listener = [], None  # peers that have proven nothing yet
        self.watch, self.arms = 0, 0  # the dead-man's pid, and how often one was armed

    def run(self) -> None:
        """Never returns, never raises: the end of process 1 is the end of the dead-man."""
        self.arm()
        threading.Thread(target=self.begin).start()
        signal.signal(signal.SIGTERM, lambda *_: self.leave())
        while True:
            try:
                pid, status = os.wait()
                with self.changed:
                    self.ends[pid] = os.waitstatus_to_exitcode(status)
                    self.changed.notify_all()
                if pid == self.watch:
                    if status == 0:
                        self.leave()
                    say("the dead-man was ended")
                    time.sleep(0.5)
                    self.arm()
            except OSError as error:
                say(error)
                time.sleep(1)

    def arm(self) -> None:
        self.watch = self.spawn([sys.executable, "-ISuc", self.dead_man], self.environ)
        self.arms += 1

    def begin(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        if self.packages:
            self.pip = self.install()
        self.listen()

    def install(self) -> int:
        """Start pip, without our secrets, its output in a file; its pid."""
        environ = {name: self.environ[name] for name in self.environ if "PPSMOKE" not in name and "KEY" not in name}
        environ["PIP_BREAK_SYSTEM_PACKAGES"] = "1"
        with open(self.folder + "/pip.log", "a") as log:
            return self.spawn([sys.executable, *PIP.split(), *self.packages], environ, log.fileno())

    def spawn(self, command: Sequence[str], environ: Mapping[str, str], output: int = 1) -> int:
        """Start a child, in a group of its own; its pid. Its end is seen in self.ends."""
        actions = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        with self.changed:
            pid = os.posix_spawn(command[0], command, environ, file_actions=actions, setpgroup=0)
            self.ends.pop(pid, 0)  # of an earlier process of that number
        self.children.append(pid)
        return pid

    def leave(self) -> None:
        """End all we started, and ourselves: the container is being stopped, or its instance is gone."""
        for pid in self.children:
            if pid not in self.ends:
                os.killpg(pid, 9)
        os._exit(0)

    def listen(self) -> None:
        """Let peers in, each with a thread of its own, until the listener is closed."""
        host, port = self.environ.get("PPSMOKE_NODE_LISTEN", "0.0.0.0:7070").split(",")[0].split(":")
        listener = None
        while listener == self.listener:
            try:
                if not listener:
                    self.listener = listener = socket.create_server((host, int(port)))  # sets SO_REUSEADDR
                    say("listening on " + port)
                peer = listener.accept()[0]
                self.peers.append(peer)
                threading.Thread(target=self.meet, args=(peer,)).start()
                if len(self.peers) > MAX_PEERS:
                    self.peers.pop(0).shutdown(2)
            except OSError as error:
                if listener == self.listener:
                    say(error)
                    time.sleep(0.2)

    def close(self) -> socket.socket | None:
        """Free the port; what was listening there. A close alone would leave it listening while accept() waits."""
        listener, self.listener = self.listener, None
        if listener:
            listener.shutdown(2)
            listener.close()
        return listener

    def meet(self, peer: socket.socket) -> None:
        """One peer, whatever it is, from its first byte to its last. Wrong ones are dropped without a word."""
        with peer:
            try:
                secret = bytes.fromhex(self.environ["PPSMOKE_NODE_SECRET"])
                nonce = os.urandom(32)
                peer.sendall(MAGIC + nonce)
                said = read(peer, HEADER_BYTES + 32, HELLO_S)
                about = nonce + said[:HEADER_BYTES]
                self.peers.remove(peer)
                if len(secret) == 32 and hmac.compare_digest(said[HEADER_BYTES:], proof(secret, b"peer", about)):
                    open(self.folder + "/heartbeat", "w").close()  # the orchestrator has been heard
                    peer.sendall(proof(secret, b"boot", about))
                    self.welcome(peer, secret, about)
            except Exception as error:
                say(f"peer dropped: {error!r}")
            if peer in self.peers:
                self.peers.remove(peer)

    def welcome(self, peer: socket.socket, secret: bytes, about: bytes) -> None:
        """A peer that has proven itself: the first to bring code gets a second stage that runs it."""
        payload = receive(peer, about)
        if self.close():
            try:
                path = self.folder + "/" + about[73:].hex() + ".pyz"
                with open(path, "wb") as file:
                    file.write(payload[4 + int.from_bytes(payload[:4], "big") :])
                sys.path.insert(0, path)
                from ppsmoke.rent.second_stage import SecondStage

                SecondStage(self).run(peer, secret, about, payload)
            finally:
                threading.Thread(target=self.listen).start()


def main(dead_man: str, *packages: str) -> None:
    ProcessOne(os.environ, dead_man, packages).run()
