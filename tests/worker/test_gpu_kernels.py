"""What can be said of the GPU's kernels without a GPU: that each of them can be one, and that they are right."""

import os
import subprocess
import sys

import pytest

from tests.lab.paths import DATA


@pytest.mark.slow
def test_every_kernel_of_a_stage_on_a_gpu_renders_as_ptx(tmp_path):
    command = [sys.executable, "-m", "tests.lab.ptx_device", str(DATA / "tiny256-llama3-q4_k_m.gguf")]
    environment = os.environ | {"CACHELEVEL": "0", "CUDA_PTX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0 and done.stdout.startswith("rendered: "), done.stderr[-3000:]


@pytest.mark.slow
def test_attention_as_a_gpu_computes_it_equals_the_oracle(monkeypatch):
    from ppsmoke.worker.weights import Placement
    from tests.lab.oracle import Chain, expectations

    monkeypatch.setattr(Placement, "packed", lambda self, parts: None)
    chain = Chain(DATA / "tiny-llama3-f32.gguf", 1, wire_dtype="float32")
    verdicts = [chain.continuation(expected) for expected in expectations("tiny-llama3-f32.gguf")]
    assert sum(verdict.decisive for verdict in verdicts) > 60
    assert all(verdict.decisive_equal == verdict.decisive for verdict in verdicts)
    assert max(verdict.worst_logit for verdict in verdicts) < 0.02
