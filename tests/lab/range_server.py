"""An HTTP server on loopback that serves one file in byte ranges and misbehaves on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# A fault answers one request in the server's place and returns True, or returns False to let it be answered well.
Fault = Callable[["Handler", int, int], bool]


@dataclass
class RangeServer:
    """The file, what was asked for, and the faults of the next requests (one each, in order)."""

    data: bytes
    url: str = ""
    etag: str | None = '"one"'
    faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    requests: list[tuple[int, int]] = field(default_factory=list)  # begin, end (exclusive)
    headers: list[dict[str, str]] = field(default_factory=list)


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
def serving(data: bytes, *, path: str = "/model.gguf") -> Iterator[RangeServer]:
    served = RangeServer(data)
    handler = type("BoundHandler", (Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_port}{path}"
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
