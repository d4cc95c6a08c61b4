"""One HTTP exchange with urllib, bounded in every way: no redirects, a cap on the body, one deadline for all of it.

Knows nothing of routes or verdicts; the key goes into the Authorization header of the configured host and nowhere else.
"""

from __future__ import annotations

import email.utils
import functools
import http.client
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from typing import Any, Protocol

from ppsmoke import __version__
from ppsmoke.errors import UsageError
from ppsmoke.rent.api_key import ApiKey

DEFAULT_URL = "https://console.vast.ai"
MAX_BODY_BYTES = 16 << 20  # a full page of 64 offers is about 200 KB
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Reply:
    """What came back, whatever the status. `json` is None when the body is no JSON (and when it is `null`)."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def served_at(self) -> float | None:
        """The service's own clock, seconds since 1970, from its Date header."""
        try:
            return email.utils.parsedate_to_datetime(self.headers.get("date", "")).timestamp()
        except (TypeError, ValueError, OverflowError):
            return None


class NoReply(Exception):
    """No complete answer: the request may have been carried out or not. `sent`: could it have left this machine?"""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class Transport(Protocol):
    """A blocking exchange. Raises NoReply; returns a Reply for every complete answer."""

    def exchange(self, method: str, target: str, *, body: bytes | None, within_s: float) -> Reply: ...

    def fetch(self, url: str, *, within_s: float, max_bytes: int) -> Reply: ...


def check_base_url(url: str) -> str:
    """The base URL without its last slash, and without the /api/v0 that every path of ours begins with: it is often
    written along. Raises UsageError for what the key must not be sent to."""
    parts = urllib.parse.urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError("VAST_URL is no http(s) address", hint=f"unset it to use {DEFAULT_URL}")
    if parts.username is not None or parts.password is not None:
        raise UsageError("VAST_URL holds a user name or password; the key has its own option")
    if parts.scheme == "http" and not _is_near(parts.hostname):
        raise UsageError(
            "VAST_URL is plain http to another network: the key would travel unencrypted", hint="use https"
        )
    path = re.sub(r"/api(/v[0-9]+)?$", "", parts.path.rstrip("/"))
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _is_near(host: str) -> bool:
    """A private or loopback address: a fake service in a lab."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost"


class UrllibTransport:
    """The real thing. Safe to use from several threads at once."""

    def __init__(self, base_url: str, key: ApiKey) -> None:
        self.base_url = check_base_url(base_url)
        self._key = key
        self._near = _is_near(urllib.parse.urlsplit(self.base_url).hostname or "")

    def exchange(self, method: str, target: str, *, body: bytes | None, within_s: float) -> Reply:
        """One API call; `target` is the path with its query. Raises NoReply."""
        request = urllib.request.Request(self.base_url + target, data=body, method=method)
        request.add_header("Authorization", f"Bearer {self._key.reveal()}")
        request.add_header("Accept", "application/json, text/plain, */*")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        reply = self._send(request, within_s=within_s, max_bytes=MAX_BODY_BYTES)
        return replace(reply, body=self._key.redact(reply.body))

    def fetch(self, url: str, *, within_s: float, max_bytes: int) -> Reply:
        """A plain GET of an address that the service named (a log file): without the key, cut at max_bytes."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise NoReply("an address that is no http(s) URL", sent=False)
        return self._send(urllib.request.Request(url), within_s=within_s, max_bytes=max_bytes, cut=True)

    def _send(self, request: urllib.request.Request, *, within_s: float, max_bytes: int, cut: bool = False) -> Reply:
        request.add_header("User-Agent", f"ppsmoke/{__version__}")
        call = _Call(time.monotonic() + within_s)
        opener = _opener(call, scheme=request.type, proxies={} if self._near else None)
        try:
            with call, _answer(opener, request, within_s) as response:
                body = _read_capped(response, max_bytes, cut=cut)
                if call.late:  # a body without a length ends where the timer hung up
                    raise TimeoutError
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, body, headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Under load urllib's own timeout may come before the timer's thread has run.
            if call.late or isinstance(getattr(error, "reason", error), TimeoutError):
                raise NoReply(f"no complete answer within {within_s:g} s", sent=call.connected) from None
            raise NoReply(_reason(error), sent=call.connected) from None


def _answer(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float) -> Any:
    """The response, also of a status that urllib raises for: its body says what the status means."""
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error


def _read_capped(response: Any, max_bytes: int, *, cut: bool) -> bytes:
    body = bytearray()
    while len(body) <= max_bytes:
        piece = response.read(min(_CHUNK_BYTES, max_bytes + 1 - len(body)))
        if not piece:
            # http.client returns what it has when the peer hangs up inside a sized read.
            if getattr(response, "length", None):
                raise http.client.IncompleteRead(bytes(body), response.length)
            return bytes(body)
        body += piece
    if cut:
        return bytes(body[:max_bytes])
    raise ValueError(f"a body of more than {max_bytes} bytes")


def _reason(error: Exception) -> str:
    """What went wrong on the way, in a few words that hold neither URL nor header."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, ssl.SSLError):
        return f"TLS: {inner.reason or 'handshake failed'}"
    if isinstance(inner, OSError):
        return inner.strerror or type(inner).__name__
    if isinstance(inner, http.client.IncompleteRead):
        return "the answer was cut short"
    if isinstance(inner, http.client.HTTPException):
        return f"an answer that is no HTTP ({type(inner).__name__})"
    return str(inner) if isinstance(inner, ValueError) and "body of more" in str(inner) else type(inner).__name__


class _Call:
    """The deadline of one exchange. urllib's timeout is per read, so a peer that drips bytes could hold us for hours:
    a timer shuts the socket down instead."""

    def __init__(self, at: float) -> None:
        self._at = at
        self._socket: socket.socket | None = None
        self._timer: threading.Timer | None = None
        self.connected = False
        self.late = False

    def opened(self, sock: socket.socket) -> None:
        self.connected = True
        self._socket = sock
        if self.late:
            self._shut()

    def _on_time_up(self) -> None:
        self.late = True
        self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            try:
                # Past SSLSocket.shutdown, which would pull the TLS object from under the reading thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                pass  # already closed

    def __enter__(self) -> _Call:
        self._timer = threading.Timer(max(0.0, self._at - time.monotonic()), self._on_time_up)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would carry the Authorization header to any host a redirect names, and turn a POST into a GET."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Message, newurl: str) -> None:
        return None  # the 3xx comes back as the answer that it is


def _opener(call: _Call, *, scheme: str, proxies: dict[str, str] | None) -> urllib.request.OpenerDirector:
    """An opener for http and https alone (no file:, no ftp:) whose connections report their socket to `call`."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _NoRedirects(),
        urllib.request.HTTPErrorProcessor(),
        _Https(call) if scheme == "https" else _Http(call),
    ):
        opener.add_handler(handler)
    return opener


def _reporting(connection: Any, call: _Call) -> Any:
    """The connection, made to tell `call` of its socket as soon as it has one."""
    connect: Callable[[], None] = connection.connect

    def connect_and_tell() -> None:
        connect()
        call.opened(connection.sock)

    connection.connect = connect_and_tell
    return connection


class _Http(urllib.request.HTTPHandler):
    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(lambda host, **rest: _reporting(http.client.HTTPConnection(host, **rest), self._call), req)


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all calls: reading the system's certificates takes 30 ms of computing."""
    return ssl.create_default_context()


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, call: _Call) -> None:
        super().__init__(context=_tls())
        self._call = call

    def https_open(self, req: urllib.request.Request) -> Any:
        def connection(host: str, **rest: Any) -> Any:
            return _reporting(http.client.HTTPSConnection(host, context=_tls(), **rest), self._call)

        return self.do_open(connection, req)
