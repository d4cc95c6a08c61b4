"""The dequantisers, bit for bit against the reference's, on random bytes and on extreme ones."""

from __future__ import annotations

import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("numpy")

import numpy as np  # noqa: E402

from ppsmoke.errors import GgufError  # noqa: E402
from ppsmoke.worker.dequant import BLOCKS, CHUNK_WEIGHTS, dequantise  # noqa: E402
from ppsmoke.worker.fetch import FileSource  # noqa: E402
from ppsmoke.worker.gguf import Gguf  # noqa: E402
from tests.worker.sources import DATA  # noqa: E402


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal as bits, -0.0 and 0.0 apart, every NaN alike."""
    theirs = np.ascontiguousarray(theirs, np.float32).reshape(ours.shape)
    equal = ours.view(np.uint32) == theirs.view(np.uint32)
    return bool((equal | (np.isnan(ours) & np.isnan(theirs))).all())


def reference(raw: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", BLOCKS)
def test_any_bytes_whatever_give_the_references_values(kind):
    weights, nbytes, _ = BLOCKS[kind]
    blocks = 3 * CHUNK_WEIGHTS // weights + 5 if weights > 1 else CHUNK_WEIGHTS + 5
    raw = np.random.default_rng(1).integers(0, 256, (1, blocks * nbytes), np.uint8)
    raw[0, :nbytes] = 0
    raw[0, nbytes : 2 * nbytes] = 255
    ours = dequantise(raw.tobytes(), kind, (blocks * weights,))
    assert ours.dtype == np.float32 and ours.flags.writeable and ours.flags.c_contiguous
    assert same_bits(ours, reference(raw, kind))


@pytest.mark.parametrize("path", sorted(DATA.glob("*.gguf")), ids=lambda path: path.stem)
def test_every_tensor_of_a_file_of_llama_cpp_gives_the_references_values(path):
    source = FileSource(path)
    ours = Gguf.read(source).tensors
    for tensor in gguf.GGUFReader(path).tensors:
        info = ours[tensor.name]
        values = dequantise(source.read(info.offset, info.nbytes), info.type, info.shape)
        assert values.shape == info.shape
        assert same_bits(values, gguf.quants.dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda raw: np.frombuffer(raw, np.uint8)])
def test_any_buffer_will_do_and_is_not_kept(buffer):
    raw = np.arange(8, dtype="<f4").tobytes()
    values = dequantise(buffer(raw), "F32", (2, 4))
    values[0, 0] = 9.0
    assert raw == np.arange(8, dtype="<f4").tobytes() and values[1, 3] == 7.0


@pytest.mark.parametrize(
    ("kind", "nbytes", "shape"), [("Q4_1", 19, (32,)), ("Q4_1", 21, (32,)), ("Q6_K", 210, (2, 100)), ("F16", 3, (1,))]
)
def test_bytes_that_do_not_fit_the_shape_are_refused(kind, nbytes, shape):
    with pytest.raises(GgufError, match=f"{nbytes} bytes are no {kind} tensor"):
        dequantise(bytes(nbytes), kind, shape)


def test_a_type_that_we_do_not_know_is_refused_by_name():
    with pytest.raises(GgufError, match="IQ4_NL"):
        dequantise(bytes(18), "IQ4_NL", (32,))
