"""A pair of hands inside a host of the lab: opens sockets and says what it sees. JSON lines in, JSON lines out.

python -m tests.lab.nat_lab.hand. Nothing here knows what is being measured; `Hand` is the other end of the pipes.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
from typing import Any

from tests.lab.nat_lab.lab import PIPE, LabNode

MAX_TEXT_BYTES = 1024
TCP, UDP = socket.SOCK_STREAM, socket.SOCK_DGRAM


class Hand:
    """The hand of a host, as the measuring process holds it. Times are in seconds; a socket is known by its name."""

    def __init__(self, node: LabNode) -> None:
        self.name = node.name
        self._process = node.popen([sys.executable, "-m", "tests.lab.nat_lab.hand"], stdin=PIPE)

    def do(self, op: str, name: str, **more: Any) -> Any:
        self._process.stdin.write(json.dumps({"op": op, "name": name, **more}).encode() + b"\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the hand in {self.name} has ended ({self._process.wait(5)}) after {op} {name}")
        return json.loads(line)

    def bind(self, name: str, port: int = 0) -> int:
        """A UDP socket; its port."""
        return self.do("bind", name, port=port)

    def listen(self, name: str, port: int) -> None:
        self.do("listen", name, port=port)

    def send(self, name: str, to: tuple[str, int], text: str) -> None:
        self.do("send", name, to=to, text=text)

    def receive(self, name: str, within_s: float) -> tuple[str, str, int] | None:
        """Text, host and port of a datagram, or of a connection that a listener accepts; None if nothing came."""
        answer = self.do("receive", name, within_s=within_s)
        return tuple(answer) if answer else None

    def connect(self, name: str, to: tuple[str, int], text: str, port: int = 0) -> int:
        """Begin to connect, from that port; the port. What becomes of it: outcome."""
        return self.do("connect", name, to=to, text=text, port=port)

    def outcome(self, name: str, within_s: float) -> str:
        """connected, refused, silent, or the error's name."""
        return self.do("outcome", name, within_s=within_s)


class _Sockets:
    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._texts: dict[str, str] = {}

    def obey(self, request: dict[str, Any]) -> Any:
        name = request["name"]
        match request["op"]:
            case "bind":
                return self._new(name, UDP, request["port"]).getsockname()[1]
            case "listen":
                self._new(name, TCP, request["port"]).listen(64)
            case "send":
                self._sockets[name].sendto(request["text"].encode(), tuple(request["to"]))
            case "receive":
                return self._receive(self._sockets[name], request["within_s"])
            case "connect":
                one = self._new(name, TCP, request["port"])
                one.connect_ex(tuple(request["to"]))
                self._texts[name] = request["text"]
                return one.getsockname()[1]
            case "outcome":
                return self._outcome(name, request["within_s"])
        return None

    def _new(self, name: str, kind: int, port: int) -> socket.socket:
        if name in self._sockets:
            self._sockets.pop(name).close()
        one = self._sockets[name] = socket.socket(socket.AF_INET, kind)
        one.setblocking(False)
        if kind == TCP:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("0.0.0.0", port))
        return one

    @staticmethod
    def _receive(one: socket.socket, within_s: float) -> tuple[str, str, int] | None:
        if not select.select([one], [], [], within_s)[0]:
            return None
        if one.type == UDP:
            data, (host, port) = one.recvfrom(MAX_TEXT_BYTES)
            return data.decode(), host, port
        connection, (host, port) = one.accept()
        with connection:
            connection.settimeout(within_s)
            return connection.recv(MAX_TEXT_BYTES).decode(), host, port

    def _outcome(self, name: str, within_s: float) -> str:
        one = self._sockets[name]
        if not select.select([], [one], [], within_s)[1]:
            return "silent"
        error = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error == errno.ECONNREFUSED:
            return "refused"
        if error:
            return errno.errorcode[error]
        one.sendall(self._texts[name].encode())
        return "connected"


def main() -> None:
    sockets = _Sockets()
    for line in sys.stdin:
        print(json.dumps(sockets.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
