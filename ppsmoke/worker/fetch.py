"""Where a model's bytes come from: a local file, the cache, an HTTPS server. Imports neither numpy nor tinygrad."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from ppsmoke.errors import FetchError, InputError
from ppsmoke.worker.gguf import ByteSource

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


class FileSource:
    """A local file as a ByteSource; reads by position, so that threads may share it."""

    def __init__(self, path: Path, *, name: str = "") -> None:
        self.name = name or str(path)
        self.bytes_read = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._fd)
        except OSError as error:
            raise InputError(f"{self.name}: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
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

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cache_dir() -> Path:
    """The folder of everything we keep between runs."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ppsmoke"


def open_model(reference: str, *, progress: Progress) -> ByteSource:
    """The model's bytes; reference is a path to a GGUF file."""
    return FileSource(Path(reference))
