"""Where the tests' data lies."""

from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
TINY_F32 = DATA / "tiny-llama3-f32.gguf"
