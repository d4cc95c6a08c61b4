"""An HTTP or HTTPS server on loopback that serves one file in byte ranges and misbehaves on demand."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Self-signed, for 127.0.0.1; its key opens nothing else. A client trusts it if SSL_CERT_FILE names it.
LAB_CERTIFICATE = Path(__file__).parents[1] / "data" / "lab-tls.pem"

# A fault answers one request in the server's place and returns True, or returns False to let it be answered well.
Fault = Callable[["Handler", int, int], bool]


@dataclass
class RangeServer:
    """The file, what was asked for, and the faults of the next requests (one each, in order)."""

    data: bytes | memoryview
    url: str = ""
    etag: str | None = '"one"'
    faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    requests: list[tuple[int, int]] = field(default_factory=list)  # begin, end (exclusive)
    sent: list[tuple[int, int]] = field(default_factory=list)  # the same of what was written, in the order of the ends
    headers: list[dict[str, str]] = field(default_factory=list)


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what some tests are about; anything else is told."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, ssl.SSLError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: RangeServer

    def do_GET(self) -> None:  # noqa: N802 (the base class's name)
        begin, last = self.headers["Range"].removeprefix("bytes=").split("-")
        served, end = self.served, min(int(last) + 1, len(self.served.data))
        served.requests.append((int(begin), end))
        served.headers.append(dict(self.headers))
        fault = served.faults.pop(0) if served.faults else served.always
        if fault is None or not fault(self, int(begin), end):
            self.answer(int(begin), end)

    def answer(
        self, begin: int, end: int, *, send: int | None = None, content_range: str = "", etag: str | None = None
    ) -> None:
        """206 with these bytes; send: hang up after so many."""
        data = self.served.data[begin:end]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", content_range or f"bytes {begin}-{end - 1}/{len(self.served.data)}")
        if etag or self.served.etag:
            self.send_header("ETag", etag or self.served.etag or "")
        self.end_headers()
        self.wfile.write(data[:send])
        self.served.sent.append((begin, begin + len(data[:send])))
        if send is not None:
            self.wfile.flush()
            self.close_connection = True

    def status(self, code: int, **headers: str) -> bool:
        self.send_response(code)
        for name, text in {"Content-Length": "0", **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        return True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(
    data: bytes | memoryview, *, path: str = "/model.gguf", certificate: Path | None = None
) -> Iterator[RangeServer]:
    """certificate: a PEM file with its key, to speak https."""
    served = RangeServer(data)
    handler = type("BoundHandler", (Handler,), {"served": served})
    server = Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        # Shaking hands is left to the connection's own thread, so that a slow client holds up no other.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    served.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}{path}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="range server")
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hang_up_after(count: int) -> Fault:
    """Answer well, but only the first bytes."""

    def fault(handler: Handler, begin: int, end: int) -> bool:
        handler.answer(begin, end, send=count)
        return True

    return fault


def refuse_with(code: int, **headers: str) -> Fault:
    return lambda handler, begin, end: handler.status(code, **headers)


@contextmanager
def serving_https_with_a_redirect(data: bytes | memoryview) -> Iterator[tuple[RangeServer, RangeServer]]:
    """(front, store): the front sends every request on to the store, which has another port, path and a query."""
    with (
        serving(data, path="/store/0123456789abcdef", certificate=LAB_CERTIFICATE) as store,
        serving(b"", certificate=LAB_CERTIFICATE) as front,
    ):
        front.always = refuse_with(302, Location=store.url + "?signature=secret")
        yield front, store


def trusting(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a client that believes the https servers here, and goes to them without a proxy."""
    return environment | {"SSL_CERT_FILE": str(LAB_CERTIFICATE), "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def answer_well() -> Fault:
    """No fault: lets the requests before a fault pass."""
    return lambda handler, begin, end: False


def sent_twice(ranges: Iterable[tuple[int, int]]) -> int:
    """How many bytes of these ranges were sent before."""
    again, reached = 0, 0
    for begin, end in sorted(ranges):
        again += max(0, min(end, reached) - begin)
        reached = max(reached, end)
    return again


def cut(served: RangeServer) -> list[tuple[int, int]]:
    """The answers that ended early: begin, and the end that they reached."""
    return [(begin, end) for begin, end in served.sent if (begin, end) not in served.requests]


def resumptions(served: RangeServer) -> list[tuple[int, int]]:
    """The requests that ask for the rest of a cut answer: they begin where its last whole piece ended, or later."""
    asked = {begin: end for begin, end in served.requests}
    rests = [(begin, reached, asked[begin]) for begin, reached in cut(served)]
    return [
        (begin, end)
        for begin, end in served.requests
        if any(first < begin <= reached < end <= last for first, reached, last in rests)
    ]
