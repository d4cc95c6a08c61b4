"""The writer of small models, judged by the reference reader."""

from __future__ import annotations

import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("numpy")

import numpy as np  # noqa: E402

from tests.lab.tiny_gguf import TYPES, TinyLlama  # noqa: E402


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "Q5_0"])
def test_the_reference_reader_reads_a_tiny_model_of_every_type(kind, tmp_path):
    wide = kind in ("Q4_K", "Q6_K")
    model = TinyLlama(type=kind, width=256 if wide else 64, feed_forward=256 if wide else 128, blocks=5, output="own")
    reader = gguf.GGUFReader(model.write(tmp_path / "tiny.gguf"))
    assert len(reader.tensors) == 5 * 9 + 3
    gate = next(tensor for tensor in reader.tensors if tensor.name == "blk.4.ffn_gate.weight")
    values = gguf.quants.dequantize(gate.data, gate.tensor_type)
    assert np.isfinite(values).all() and 0.3 < values.std() * model.width**0.5 < 3


def test_the_same_seed_makes_the_same_file():
    assert TinyLlama(seed=4).to_bytes() == TinyLlama(seed=4).to_bytes() != TinyLlama(seed=5).to_bytes()
