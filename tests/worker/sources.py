"""Byte sources for the worker's tests."""

from __future__ import annotations

import lzma
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"
SMOLLM2_BYTES = 98_362_432


def ignore(what: str, done: int, total: int) -> None:
    """A progress report that nobody reads."""


class MemorySource:
    """Bytes in memory; size may claim more than there is, as a file's header does of its tensors' data."""

    def __init__(self, data: bytes, *, size: int | None = None, name: str = "memory.gguf") -> None:
        self.data, self.name = data, name
        self.size = len(data) if size is None else size
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        assert offset + length <= self.size
        return self.data[offset : offset + length].ljust(length, b"\0")


def smollm2_header() -> MemorySource:
    """The header of SmolLM2-135M-Instruct.Q4_1.gguf (Apache-2.0): all of its vocabulary, none of its weights."""
    data = lzma.decompress((DATA / "smollm2-header.gguf.xz").read_bytes())
    return MemorySource(data, size=SMOLLM2_BYTES, name="smollm2-header.gguf")
