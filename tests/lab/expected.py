"""One entry of the recorded oracle, as it stands in its file; loads neither numpy nor tinygrad."""

from __future__ import annotations

import json
from typing import Any

from tests.lab.paths import DATA


def expected(model: str, prompt: str, mode: str) -> dict[str, Any]:
    """The entry of prompt id `prompt` in `mode` ("raw", "chat"): ids_plain, steps {ids, text, margin, ...}.

    model: the file name of a tiny GGUF, or "smollm2".
    """
    if model == "smollm2":
        found = json.loads((DATA / "smollm2-f32.json").read_text())
    else:
        models = json.loads((DATA / "tiny.json").read_text())["models"]
        found = next(entry for entry in models if entry["gguf"] == model)
    return next(entry for entry in found["prompts"] if entry["id"] == prompt)[mode]
