"""A device that computes nothing but renders every kernel as NVIDIA's PTX: finds, without a GPU, what cannot be one.

    python -m tests.lab.ptx_device MODEL

compiles all steps of a whole-model stage for it. tinygrad's NULL device with the renderer that CUDA_PTX=1 chooses.
"""

from __future__ import annotations

import functools
import sys

from tinygrad.device import Compiled, Compiler, CompilerPair, CompilerSet
from tinygrad.renderer.ptx import PTXRenderer
from tinygrad.runtime import ops_null

from ppsmoke.worker.fetch import open_model
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.stage_model import StageModel


class PtxDevice(ops_null.NullDevice):
    """NULL, rendering for a Hopper GPU."""

    def __init__(self, device: str) -> None:
        renderer = functools.partial(PTXRenderer, "sm_90", device="NULL")
        allocator, program = ops_null.NullAllocator(self), functools.partial(ops_null.NullProgram, device)
        Compiled.__init__(self, device, allocator, CompilerSet([CompilerPair(renderer, Compiler)]), program, None)


def main() -> None:
    ops_null.NullDevice = PtxDevice
    source = open_model(sys.argv[1], progress=lambda what, done, total: None)
    model = StageModel.load(
        source,
        Gguf.read(source),
        stage=0,
        num_stages=1,
        max_context=256,
        device="NULL",
        progress=lambda what, done, total: None,
    )
    model.warm_up()
    print(f"rendered: {model.weight_bytes} bytes of weights, chunks of {model.chunk}")


if __name__ == "__main__":
    main()
