"""GGUF v2 and v3, read only: the metadata and the tensor table, never a tensor's bytes.

Every length in the file is checked against the bytes that are there before anything is allocated for it.
Format: ggml's docs/gguf.md. Knows nothing of where the bytes come from.
"""

from __future__ import annotations

import array
import hashlib
import math
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ppsmoke.errors import GgufError

FIRST_READ_BYTES = 1 << 20  # holds the whole header of a small model; over HTTP one round trip
NEXT_READ_BYTES = 8 << 20  # Llama 3's header is 7.8 MB
MAX_HEADER_BYTES = 64 << 20  # eight times the largest header of a Llama model
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NESTING = 2  # arrays of arrays; no model has them
DEFAULT_ALIGNMENT = 32  # gguf.md, general.alignment
ARCHITECTURES = ("llama",)
NEEDED_TENSORS = ("token_embd.", "output.", "output_norm.", "rope_freqs.", "blk.")  # what a Llama is made of


class ByteSource(Protocol):
    """Bytes at an address: a local file or an HTTP range reader."""

    size: int  # bytes in all
    name: str  # what an error calls it

    def read(self, offset: int, length: int) -> bytes:
        """Exactly length bytes, or an error."""
        ...

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These (offset, length) ranges will be read: a remote source brings them with few requests."""
        ...


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: shape in numpy's order (rows, cols), offset from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Gguf:
    """A file's metadata and tensor table; fingerprint is the SHA-256 (hex) of exactly these bytes."""

    name: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    fingerprint: str

    @classmethod
    def read(cls, source: ByteSource) -> Gguf:
        """Parse the header. Raises GgufError for anything that is no Llama that we can compute."""
        header = _Header(source)
        _read_magic(header)
        tensor_count = header.count("tensors", smallest_bytes=24)
        metadata = _read_metadata(header)
        _check_architecture(metadata, header)
        rows = [_read_tensor_row(header) for _ in range(tensor_count)]
        tensors = _place(rows, header, _alignment(metadata, header))
        return cls(source.name, metadata, tensors, header.fingerprint())

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        """An integer key within [low, high]. Raises GgufError if it is absent (and has no default) or is no such."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad_key(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number. Raises GgufError like integer()."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._bad_key(key, "a positive number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string key. Raises GgufError like integer()."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._bad_key(key, "a string")
        return value

    def _bad_key(self, key: str, wanted: str) -> GgufError:
        if key not in self.metadata:
            return GgufError(f"{self.name}: the key {key} is missing", hint="the file is no complete Llama model")
        return GgufError(f"{self.name}: {key} is not {wanted}: {str(self.metadata[key])[:40]!r}")


class _GgmlType(NamedTuple):
    name: str
    weights: int  # a block
    nbytes: int  # a block


# ggml.h, enum ggml_type. The ones we cannot compute are here so that an error can name them.
TYPES = {
    0: _GgmlType("F32", 1, 4),
    1: _GgmlType("F16", 1, 2),
    2: _GgmlType("Q4_0", 32, 18),
    3: _GgmlType("Q4_1", 32, 20),
    6: _GgmlType("Q5_0", 32, 22),
    7: _GgmlType("Q5_1", 32, 24),
    8: _GgmlType("Q8_0", 32, 34),
    9: _GgmlType("Q8_1", 32, 36),
    10: _GgmlType("Q2_K", 256, 84),
    11: _GgmlType("Q3_K", 256, 110),
    12: _GgmlType("Q4_K", 256, 144),
    13: _GgmlType("Q5_K", 256, 176),
    14: _GgmlType("Q6_K", 256, 210),
    15: _GgmlType("Q8_K", 256, 292),
    16: _GgmlType("IQ2_XXS", 256, 66),
    17: _GgmlType("IQ2_XS", 256, 74),
    18: _GgmlType("IQ3_XXS", 256, 98),
    19: _GgmlType("IQ1_S", 256, 50),
    20: _GgmlType("IQ4_NL", 32, 18),
    21: _GgmlType("IQ3_S", 256, 110),
    22: _GgmlType("IQ2_S", 256, 82),
    23: _GgmlType("IQ4_XS", 256, 136),
    24: _GgmlType("I8", 1, 1),
    25: _GgmlType("I16", 1, 2),
    26: _GgmlType("I32", 1, 4),
    27: _GgmlType("I64", 1, 8),
    28: _GgmlType("F64", 1, 8),
    29: _GgmlType("IQ1_M", 256, 56),
    30: _GgmlType("BF16", 1, 2),
    34: _GgmlType("TQ1_0", 256, 54),
    35: _GgmlType("TQ2_0", 256, 66),
    39: _GgmlType("MXFP4", 32, 17),
}
COMPUTABLE = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")  # dequant.BLOCKS; a test holds the two together

# gguf.md, gguf_metadata_value_type: struct code and bytes. 8 is a string, 9 an array.
SCALARS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("?", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
STRING, ARRAY = 8, 9
SMALLEST_STRING_BYTES, SMALLEST_ARRAY_BYTES = 8, 12
NOT_COMPLETE = "the file is damaged or its download is not complete"


class _Header:
    """A cursor over the file's first bytes, which it reads in few large pieces."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.name = source.name
        self.data = bytearray()
        self.at = 0
        self.limit = min(source.size, MAX_HEADER_BYTES)

    def fail(self, cause: str, hint: str = NOT_COMPLETE) -> GgufError:
        return GgufError(f"{self.name}: {cause}", hint=hint)

    def need(self, length: int, what: str) -> None:
        """Make sure that `length` more bytes are in memory."""
        end = self.at + length
        if end > self.limit:
            if self.limit < self.source.size:
                raise self.fail(f"{what} makes the header larger than {MAX_HEADER_BYTES >> 20} MiB")
            raise self.fail(f"the file ends in the middle of its header ({what} at byte {self.at})")
        while len(self.data) < end:
            step = NEXT_READ_BYTES if self.data else FIRST_READ_BYTES
            wanted = max(step, end - len(self.data))
            self.data += self.source.read(len(self.data), min(wanted, self.limit - len(self.data)))

    def scalar(self, code: str, length: int, what: str) -> Any:
        self.need(length, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += length
        return value

    def count(self, what: str, *, smallest_bytes: int) -> int:
        """A 64-bit count of things that take at least smallest_bytes each in what is left of the file."""
        count = self.scalar("Q", 8, f"the number of {what}")
        if count * smallest_bytes > self.limit - self.at:
            raise self.fail(f"it claims {count} {what} in the {self.limit - self.at} bytes that are left")
        return count

    def string(self, what: str) -> str:
        length = self.count(f"bytes of {what}", smallest_bytes=1)
        self.need(length, what)
        start, self.at = self.at, self.at + length
        try:
            return str(memoryview(self.data)[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {start} is no valid UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """Many strings; the loop is bare, as a Llama 3 has 408,000 of them."""
        found: list[str] = []
        for _ in range(count):
            data, at = self.data, self.at
            if at + 8 > len(data):
                self.need(8, what)
            length = int.from_bytes(data[at : at + 8], "little")
            if at + 8 + length > len(data):
                found.append(self.string(what))
                continue
            self.at = at + 8 + length
            try:
                found.append(data[at + 8 : self.at].decode())
            except UnicodeDecodeError:
                raise self.fail(f"{what} at byte {at + 8} is no valid UTF-8") from None
        return found

    def value(self, kind: int, what: str, nesting: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(*SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY and nesting <= MAX_NESTING:
            return self.array(what, nesting)
        raise self.fail(f"{what} has the unknown value type {kind}")

    def array(self, what: str, nesting: int) -> list[Any] | array.array[Any]:
        """Numbers as an array.array, which takes the memory that they take in the file; the rest as a list."""
        kind = self.scalar("I", 4, what)
        if kind in SCALARS:
            code, length = SCALARS[kind]
            count = self.count(f"values in {what}", smallest_bytes=length)
            self.need(count * length, what)
            values = array.array(code.replace("?", "B"), self.data[self.at : self.at + count * length])
            if sys.byteorder == "big":
                values.byteswap()
            self.at += count * length
            return values
        if kind == STRING:
            return self.strings(self.count(f"strings in {what}", smallest_bytes=SMALLEST_STRING_BYTES), what)
        count = self.count(f"values in {what}", smallest_bytes=SMALLEST_ARRAY_BYTES)
        return [self.value(kind, what, nesting + 1) for _ in range(count)]

    def fingerprint(self) -> str:
        return hashlib.sha256(memoryview(self.data)[: self.at]).hexdigest()


def _read_magic(header: _Header) -> None:
    if header.limit < 8 or (magic := header.scalar("4s", 4, "the magic")) != b"GGUF":
        seen = "" if header.limit < 8 else f" (it begins with {bytes(magic)!r})"
        raise header.fail(f"this is no GGUF file{seen}", hint="--model wants a model in GGUF format")
    version = header.scalar("I", 4, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "big-endian GGUF" if swapped in (2, 3) else f"GGUF version {version}"
        raise header.fail(f"this is {what}", hint="versions 2 and 3 in little-endian byte order can be read")


def _read_metadata(header: _Header) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(header.count("metadata keys", smallest_bytes=13)):
        key = header.string("a metadata key")
        kind = header.scalar("I", 4, f"the type of {key[:64]!r}")
        if key in metadata:
            raise header.fail(f"the metadata key {key[:64]!r} stands there twice")
        metadata[key] = header.value(kind, repr(key[:64]))
    return metadata


def _check_architecture(metadata: dict[str, Any], header: _Header) -> None:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        named = repr(architecture[:64]) if isinstance(architecture, str) else "not said"
        hint = f"architectures that can be computed: {', '.join(ARCHITECTURES)}"
        raise header.fail(f"the model's architecture is {named}", hint=hint)


def _alignment(metadata: dict[str, Any], header: _Header) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment not in (1 << bit for bit in range(3, 17)):
        raise header.fail(f"general.alignment is {str(alignment)[:40]}, not a power of two from 8 to 65536")
    return alignment


class _Row(NamedTuple):
    name: str
    dims: tuple[int, ...]  # ggml's order: the innermost first
    type: int
    offset: int  # from the start of the data section


def _read_tensor_row(header: _Header) -> _Row:
    name = header.string("a tensor's name")
    what = f"tensor {name[:64]!r}"
    count = header.scalar("I", 4, what)
    if not 1 <= count <= MAX_DIMS:
        raise header.fail(f"{what} has {count} dimensions")
    dims = tuple(header.scalar("Q", 8, what) for _ in range(count))
    return _Row(name, dims, header.scalar("I", 4, what), header.scalar("Q", 8, what))


def _place(rows: list[_Row], header: _Header, alignment: int) -> dict[str, TensorInfo]:
    """The table with absolute offsets, after all checks: inside the file, aligned, without overlap, known types."""
    data_start = -(-header.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for row in rows:
        if row.name in tensors:
            raise header.fail(f"the tensor {row.name[:64]!r} stands there twice")
        tensors[row.name] = _tensor_info(row, header, data_start, alignment)
    end, before = data_start, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < end:
            raise header.fail(f"the tensors {before[:64]!r} and {tensor.name[:64]!r} overlap")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return tensors


def _tensor_info(row: _Row, header: _Header, data_start: int, alignment: int) -> TensorInfo:
    what = f"the tensor {row.name[:64]!r}"
    kind = TYPES.get(row.type)
    if row.name.startswith(NEEDED_TENSORS) and (kind is None or kind.name not in COMPUTABLE):
        named = kind.name if kind else f"number {row.type}"
        raise header.fail(f"{what} has the type {named}", hint=f"types that can be computed: {', '.join(COMPUTABLE)}")
    if row.offset % alignment:
        raise header.fail(f"{what} is not aligned: offset {row.offset} is no multiple of {alignment}")
    kind = kind or _GgmlType(f"type {row.type}", 1, 0)  # not needed, and never read
    if 0 in row.dims or row.dims[0] % kind.weights:
        raise header.fail(f"{what} has an impossible shape for {kind.name}: {row.dims}")
    nbytes = math.prod(row.dims) // kind.weights * kind.nbytes
    offset = data_start + row.offset
    if offset + nbytes > header.source.size:
        raise header.fail(f"{what} ends at byte {offset + nbytes} of {header.source.size}")
    return TensorInfo(row.name, tuple(reversed(row.dims)), kind.name, offset, nbytes)
