"""A file on an HTTPS server, read in byte ranges that stay in the cache: a second start reads nothing again.

The cached file has the original's length and holes; beside it lies one byte per segment that says whether it is there.
Processes that read the same file share both: a segment is fetched under a lock on its byte.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import IO, Any
from urllib.parse import urlsplit

from ppsmoke import __version__
from ppsmoke.errors import FetchError
from ppsmoke.models import LOOPBACK_HOSTS, Url
from ppsmoke.worker import cache
from ppsmoke.worker.cache import Progress, writing

MAX_FILE_BYTES = 1 << 40  # a server may claim anything; ours are sparse files of that length
SEGMENT_BYTES = 1 << 20
WINDOW_SEGMENTS = 64  # one request: large enough that its round trips do not count, small enough for others to wait
MARK_SEGMENTS = 8  # between two fsyncs: what a kill costs, and how often a slow disk is waited for
SOCKET_TIMEOUT_S = 20.0  # without a single byte
SEGMENT_DEADLINE_S = 45.0  # a segment that takes longer is a stalled server: below a run's 60 s without progress
MAX_FAILURES = 5  # in a row, without a new segment between them
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 8.0  # doubled after each failure in a row, with jitter
MAX_REDIRECTS = 5
READ_BYTES = 1 << 16

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_PRESENT = b"\x01"


class _Transient(Exception):
    """A failure that may pass: worth another try."""


class HttpSource:
    """The remote file as a ByteSource. bytes_read counts what came over the network."""

    def __init__(self, url: Url, *, progress: Progress, expected_bytes: int | None = None) -> None:
        self.url, self.name = url, str(url)
        self.bytes_read = 0
        self._progress = progress
        self._planned = 0  # bytes that reads so far had to bring from the network
        self._turn = threading.Lock()
        self._pause = time.sleep
        key = f"{sha256(url.url.encode()).hexdigest()[:12]}-{url.file_name[:100]}"
        self._folder = cache.cache_dir() / "ranges" / key
        self._lock_fd = cache.open_lock(cache.lock_path(self._folder))
        self._data_fd = self._have_fd = -1
        try:
            self._open(expected_bytes)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """Exactly length bytes, from the cache or the network. Raises FetchError."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FetchError(f"{self.name}: bytes {offset} to {offset + length} of {self.size} were asked for")
        self.prefetch([(offset, length)])
        pieces = []
        while length > 0:
            piece = os.pread(self._data_fd, length, offset)
            if not piece:
                raise FetchError(f"the cached file in {self._folder} was cut short", hint="try ppsmoke cache clear")
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring these (offset, length) ranges into the cache with as few requests as possible."""
        wanted = sorted({number for offset, length in ranges for number in _segments(offset, length)})
        with self._turn:
            missing = self._missing(wanted)
            if not missing:
                return
            self._planned += sum(map(self._segment_bytes, missing))
            for first, count in _windows(missing):
                self._bring(first, count)

    def close(self) -> None:
        for fd in (self._data_fd, self._have_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._have_fd = self._lock_fd = -1

    # The cached file

    def _open(self, expected_bytes: int | None) -> None:
        """Open the cached file, or begin it with the first segment, whose answer tells the file's length."""
        # From here on nobody clears it while we read.
        cache.wait_until(lambda: cache.share_lock(self._lock_fd), waiting=self._tell_waiting)
        begin_lock = self._folder.parent / f".{self._folder.name}.begin"
        with cache.locked(begin_lock, waiting=self._tell_waiting):
            if meta := self._read_meta():
                self.size, self._etag = meta["size"], meta["etag"]
                with writing(self._folder):
                    self._open_files(flags=0)
            else:
                self._begin(self._retrying(0, self._first_segment))
        if expected_bytes is not None and self.size != expected_bytes:
            hint = "ppsmoke cache clear, and try again; if that does not help, the server has another file"
            raise FetchError(f"{self.name} has {self.size} bytes instead of {expected_bytes}", hint=hint)

    def _begin(self, first: bytes) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open_files(flags=os.O_CREAT | os.O_TRUNC)
            os.truncate(self._data_fd, self.size)
            # Written, not left as a hole: marking a segment must not fail on a full disk.
            os.pwrite(self._have_fd, bytes(-(-self.size // SEGMENT_BYTES)), 0)
            self._store(0, first)
            self._mark([0])
            self._write_meta()

    def _open_files(self, *, flags: int) -> None:
        self._data_fd = os.open(self._folder / "data", os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
        self._have_fd = os.open(self._folder / "have", os.O_RDWR | os.O_CLOEXEC | flags, 0o644)

    def _read_meta(self) -> dict[str, Any] | None:
        """Length and ETag of a file that is in the cache, if all that belongs to it is."""
        try:
            meta = json.loads((self._folder / "meta.json").read_bytes())
            size, etag = meta["size"], meta["etag"]
            whole = os.path.getsize(self._folder / "data") == size
            indexed = os.path.getsize(self._folder / "have") == -(-size // SEGMENT_BYTES)
            return {"size": size, "etag": etag} if whole and indexed and isinstance(etag, (str, type(None))) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_meta(self) -> None:
        partial = self._folder / "meta.part"
        partial.write_text(json.dumps({"url": self.name, "size": self.size, "etag": self._etag}))
        os.replace(partial, self._folder / "meta.json")

    def _missing(self, numbers: list[int]) -> list[int]:
        if not numbers:
            return []
        have = os.pread(self._have_fd, numbers[-1] + 1, 0)
        return [number for number in numbers if have[number : number + 1] != _PRESENT]

    def _store(self, number: int, data: bytes) -> None:
        with writing(self._folder):
            view, offset = memoryview(data), number * SEGMENT_BYTES
            while view:
                written = os.pwrite(self._data_fd, view, offset)
                view, offset = view[written:], offset + written
        self.bytes_read += len(data)

    def _mark(self, numbers: list[int]) -> None:
        """Say that these segments are there, once they are on the disk: a crash may lose them, never invent them."""
        with writing(self._folder):
            os.fsync(self._data_fd)
            for number in numbers:
                os.pwrite(self._have_fd, _PRESENT, number)
        numbers.clear()

    def _segment_bytes(self, number: int) -> int:
        return min(SEGMENT_BYTES, self.size - number * SEGMENT_BYTES)

    def _tell_waiting(self) -> int:
        self._progress(f"waiting for another process that reads {self.url.file_name}", self.bytes_read, self._planned)
        return os.pread(self._have_fd, os.fstat(self._have_fd).st_size, 0).count(_PRESENT) if self._have_fd >= 0 else 0

    # The network

    def _bring(self, first: int, count: int) -> None:
        """Fetch a window of segments; another process may be doing just that, or part of it."""
        cache.wait_until(lambda: cache.try_lock_range(self._have_fd, first, count), waiting=self._tell_waiting)
        try:
            while missing := self._missing(list(range(first, first + count))):
                start, length = _windows(missing)[0]
                self._retrying(start, lambda start=start, length=length: self._stream(start, length))
        finally:
            cache.free_range(self._have_fd, first, count)

    def _retrying(self, first: int, attempt: Callable[[], Any]) -> Any:
        """Try until it works; MAX_FAILURES in a row without any progress between them end it."""
        failures, delay, before = 0, FIRST_DELAY_S, self.bytes_read
        while True:
            try:
                return attempt()
            except _Transient as error:
                if self.bytes_read > before:
                    return None  # some segments came: the caller asks for the rest, and counting begins anew
                failures += 1
                if failures >= MAX_FAILURES:
                    hint = "check the network and try again: what has come stays in the cache"
                    cause = f"{self.name}: {error}, {failures} times in a row at byte {first * SEGMENT_BYTES}"
                    raise FetchError(cause, hint=hint) from error
                self._progress(f"trying {self.url.file_name} again: {error}", self.bytes_read, self._planned)
                self._pause(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, MAX_DELAY_S)

    def _first_segment(self) -> bytes:
        with self._request(0, SEGMENT_BYTES) as response:
            self._etag = response.headers.get("ETag")
            start, end, self.size = _content_range(response, self.name)
            if start != 0 or end != min(SEGMENT_BYTES, self.size):
                raise FetchError(f"{self.name}: the server answers with other bytes than it was asked for")
            return self._read_segment(response, end)

    def _stream(self, first: int, count: int) -> None:
        """One request for a window of segments, each stored as soon as it is whole."""
        begin, end = first * SEGMENT_BYTES, min((first + count) * SEGMENT_BYTES, self.size)
        with self._request(begin, end) as response:
            start, stop, size = _content_range(response, self.name)
            etag = response.headers.get("ETag")
            changed = _strong(etag) and _strong(self._etag) and etag != self._etag
            if size != self.size or changed:
                hint = "ppsmoke cache clear, and try again"
                raise FetchError(f"{self.name} has changed on the server since it was first read", hint=hint)
            if (start, stop) != (begin, end):
                raise FetchError(f"{self.name}: the server answers with other bytes than it was asked for")
            self._store_all(response, range(first, first + count))

    def _store_all(self, response: Any, numbers: Iterable[int]) -> None:
        stored: list[int] = []
        try:
            for number in numbers:
                self._store(number, self._read_segment(response, self._segment_bytes(number)))
                stored.append(number)
                if len(stored) == MARK_SEGMENTS:
                    self._mark(stored)
                planned = max(self._planned, self.bytes_read)
                self._progress(f"reading {self.url.file_name}", self.bytes_read, planned)
        finally:
            self._mark(stored)

    def _read_segment(self, response: IO[bytes], length: int) -> bytes:
        """Exactly length bytes within the deadline."""
        data, until = bytearray(), time.monotonic() + SEGMENT_DEADLINE_S
        while len(data) < length:
            try:
                piece = response.read1(min(READ_BYTES, length - len(data)))  # type: ignore[attr-defined]
            except (OSError, http.client.HTTPException) as error:
                raise _Transient(f"the connection broke ({error or type(error).__name__})") from error
            if not piece:
                raise _Transient("the server hung up in the middle")
            data += piece
            if time.monotonic() > until:
                raise _Transient(f"less than {SEGMENT_BYTES >> 20} MiB came in {SEGMENT_DEADLINE_S:g} s")
        return bytes(data)

    def _request(self, begin: int, end: int) -> Any:
        headers = {"Range": f"bytes={begin}-{end - 1}", "User-Agent": f"ppsmoke/{__version__}"}
        headers["Accept-Encoding"] = "identity"
        try:
            response = _OPENER.open(urllib.request.Request(self.url.url, headers=headers), timeout=SOCKET_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (408, 425, 429) or error.code >= 500:
                raise _Transient(f"the server answers {error.code}") from error
            hint = {401: "only public files can be used", 403: "only public files can be used"}.get(error.code, "")
            raise FetchError(f"{self.name}: the server answers {error.code} {error.reason}", hint=hint) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                hint = "SSL_CERT_FILE names the certificates to trust, if a proxy of yours has its own"
                raise FetchError(f"{self.name}: {reason.verify_message}", hint=hint) from error
            raise _Transient(f"no connection ({reason or type(error).__name__})") from error
        if response.status == 206:
            return response
        response.close()
        hint = "download the file and give --model its path"
        raise FetchError(f"{self.name}: the server does not answer byte ranges ({response.status})", hint=hint)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https only (http on loopback, from there alone). We have no secret that could leak: the
    request carries Range, User-Agent and Accept-Encoding, whatever the host."""

    max_redirections = MAX_REDIRECTS

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            source, target = urlsplit(req.full_url), urlsplit(newurl)
        except ValueError as error:
            raise FetchError(f"{urlsplit(req.full_url).hostname} redirects to a malformed address") from error
        local = source.scheme == "http" and target.scheme == "http" and target.hostname in LOOPBACK_HOSTS
        if target.scheme != "https" and not local:
            raise FetchError(f"{source.hostname} redirects to {target.scheme}://{target.hostname}, not to https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_Redirects)


def _content_range(response: Any, name: str) -> tuple[int, int, int]:
    """(begin, end, size) of the answer, end exclusive."""
    value = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(value.strip())
    if not match:
        raise FetchError(f"{name}: the server answers a range without saying which ({value[:60]!r})")
    start, last, size = map(int, match.groups())
    if not start <= last < size <= MAX_FILE_BYTES:
        raise FetchError(f"{name}: the server answers an impossible range ({value[:60]!r})")
    return start, last + 1, size


def _strong(etag: str | None) -> bool:
    return bool(etag) and not etag.startswith("W/")


def _segments(offset: int, length: int) -> range:
    return range(offset // SEGMENT_BYTES, -(-(offset + length) // SEGMENT_BYTES)) if length > 0 else range(0)


def _windows(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as (first, count) of neighbours, no count above WINDOW_SEGMENTS."""
    windows: list[tuple[int, int]] = []
    for number in numbers:
        if windows and number == sum(windows[-1]) and windows[-1][1] < WINDOW_SEGMENTS:
            windows[-1] = (windows[-1][0], windows[-1][1] + 1)
        else:
            windows.append((number, 1))
    return windows
