"""The sockets: two HTTP listeners on loopback that turn bytes into Requests, and Replies into bytes or into trouble."""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.lab.fake_vast.replies import Reply, Request, as_json
from tests.lab.fake_vast.service import Service

MAX_BODY_BYTES = 1 << 20
DRIP_BYTES, DRIP_PAUSE_S = 16, 0.02
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s: close() sends RST
_SECRETS = {"authorization", "cookie"}


class Listener(ThreadingHTTPServer):
    """One loopback listener; `answer` judges each request, on the thread of its connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[Request], Reply], now: Callable[[], float], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.now = answer, now
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="fake vast.ai", daemon=True)

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.closing.set()
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        with suppress(OSError), socket.create_connection(self.server_address[:2], 1.0):
            pass  # wakes the accepting thread, which else looks up only at its next poll
        ending.join()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hung up is no news; anything else is the fake's own fault and must be seen."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def open_api(service: Service, port: int) -> Listener:
    """The API's listener, with the ledger beside it."""

    def answer(request: Request) -> Reply:
        if request.path == "/_lab/ledger" and request.method == "GET":
            return as_json(service.ledger())
        return service.handle(request)

    return Listener(answer, service.clock.now, port)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "cloudfront", ""
    server: Listener
    timeout = 60.0

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_DELETE = do_GET

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The Date header tells the fake world's time."""
        return super().date_time_string(self.server.now() if timestamp is None else timestamp)

    def log_message(self, format: str, *args: Any) -> None:
        """The request log is the ledger's; nothing goes to stderr."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._send(Reply(status=413, content_type="text/html"))
            return
        self._send(self.server.answer(self._request(self.rfile.read(length))))

    def _request(self, body: bytes) -> Request:
        bearer = re.fullmatch(r"Bearer (\S+)", self.headers.get("Authorization", ""))
        headers = {name: "<redacted>" if name.lower() in _SECRETS else value for name, value in self.headers.items()}
        return Request(
            method=self.command,
            path=self.path,
            query=dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True)),
            headers=headers,
            body=body,
            key=bearer[1] if bearer else None,
            t=self.server.now(),
        )

    def _send(self, reply: Reply) -> None:
        if reply.manner == "hang":
            self._wait_for_hang_up()
        if reply.manner in ("reset", "hang"):
            self._reset()
            return
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.manner == "cut":
            self.wfile.write(reply.body[: len(reply.body) // 2])
            self.close_connection = True
        elif reply.manner == "drip":
            self._drip(reply.body)
        else:
            self.wfile.write(reply.body)

    def _drip(self, body: bytes) -> None:
        for start in range(0, len(body), DRIP_BYTES):
            self.wfile.write(body[start : start + DRIP_BYTES])
            if self.server.closing.wait(DRIP_PAUSE_S):
                return

    def _wait_for_hang_up(self) -> None:
        while not self.server.closing.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.2)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()


def dump_ledger(service: Service) -> str:
    """The ledger as the tests' failure messages show it."""
    return json.dumps({name: value for name, value in service.ledger().items() if name != "requests"}, indent=1)
