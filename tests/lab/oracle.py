"""What llama.cpp says (tests/data/*.json) against our stages, chained in this process as their nodes would chain them.

Rules: a step whose two best logits lie more than DECISIVE apart must give the oracle's token; after a first allowed
difference the rest of a continuation says nothing; an end-of-generation token ends it; logits within LOGIT_TOLERANCE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.compute import DEVICE  # isort: skip  (before tinygrad is imported)

import numpy as np

from ppsmoke.worker.fetch import open_model
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.hidden import from_wire, to_wire
from ppsmoke.worker.stage_model import StageModel

DATA = Path(__file__).parent.parent / "data"
DECISIVE = 0.05  # the margin: an honest float implementation agrees above it
LOGIT_TOLERANCE = 0.02
# llama.cpp rounds activations to half before it multiplies them with half weights; a numpy forward that does the same
# is twice as near to it on this file as one in float32. Ours is float32: the difference is the oracle's rounding.
ROUNDED_ORACLE_TOLERANCE = {"tiny-llama3-f16.gguf": 0.03}


def logit_tolerance(model: str) -> float:
    """How far a top logit of the first 8 steps may lie from the oracle's."""
    return ROUNDED_ORACLE_TOLERANCE.get(model, LOGIT_TOLERANCE)


@dataclass(frozen=True)
class Expected:
    """One prompt's greedy continuation as llama.cpp has it."""

    name: str
    ids: list[int]
    steps: list[int]
    margins: list[float]
    top: list[list[tuple[int, float]]]  # of the first steps: (token, logit)


@dataclass(frozen=True)
class Verdict:
    """How a continuation of ours compares. wrong: the first decisive step that differs, None if there is none."""

    name: str
    steps_equal: int
    steps: int
    decisive: int
    decisive_equal: int
    wrong: int | None
    worst_logit: float
    ours: list[int]

    @property
    def ids_equal(self) -> bool:
        return self.steps_equal == self.steps


def expectations(model: str) -> Iterator[Expected]:
    """Every prompt of a model: the file name of a tiny GGUF, or "smollm2"."""
    file = DATA / ("smollm2-f32.json" if model == "smollm2" else "tiny.json")
    found = json.loads(file.read_text())
    if model != "smollm2":
        found = next(entry for entry in found["models"] if entry["gguf"] == model)
    end_tokens = set(found["model"]["eog"])
    for prompt in found["prompts"]:
        for mode in ("raw", "chat"):
            entry = prompt.get(mode)
            if entry is None or "steps" not in entry:
                continue
            steps = entry["steps"]["ids"]
            length = next((at + 1 for at, token in enumerate(steps) if token in end_tokens), len(steps))
            top = [[(token, logit) for token, logit, *_ in best] for best in entry["steps"]["top"]]
            margins = entry["steps"]["margin"][:length]
            yield Expected(f"{prompt['id']}/{mode}", entry["ids"], steps[:length], margins, top[:length])


class Chain:
    """A model split over N stages in this process; hidden states pass through the wire's bytes."""

    def __init__(
        self,
        model: Path | str,
        stages: int,
        *,
        max_context: int = 2048,
        wire_dtype: str = "float32",
        gguf: Gguf | None = None,
    ) -> None:
        source = open_model(str(model), progress=lambda what, done, total: None)
        gguf = gguf or Gguf.read(source)
        self.wire_dtype = wire_dtype
        self.stages = [
            StageModel.load(
                source,
                gguf,
                stage=stage,
                num_stages=stages,
                max_context=max_context,
                device=DEVICE,
                progress=lambda what, done, total: None,
            )
            for stage in range(stages)
        ]
        for stage in self.stages:
            stage.warm_up()

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def step(self, ids: Sequence[int], position: int, *, sample: bool = True) -> int | None:
        hidden = self.stages[0].embed(ids)
        for stage in self.stages[:-1]:
            hidden = stage.forward(hidden, position=position)
            hidden = from_wire(to_wire(hidden, self.wire_dtype), self.wire_dtype, hidden.shape)
        return self.stages[-1].forward_and_sample(hidden, position=position, sample=sample)

    def prefill(self, ids: Sequence[int], *, start: int = 0) -> int:
        """The token after ids, whose first `start` are in the cache already."""
        chunk, token = self.stages[0].chunk, None
        for at in range(start, len(ids), chunk):
            token = self.step(ids[at : at + chunk], at, sample=at + chunk >= len(ids))
        assert token is not None
        return token

    def logits(self) -> np.ndarray:
        return self.stages[-1].last_logits()

    def continuation(self, expected: Expected) -> Verdict:
        """Our greedy continuation of a prompt beside the oracle's."""
        self.reset()
        ours = [self.prefill(expected.ids)]
        decisive = decisive_equal = 0
        worst, wrong = 0.0, None
        for at, (token, margin) in enumerate(zip(expected.steps, expected.margins, strict=True)):
            if at < len(expected.top):
                logits = self.logits()
                worst = max(worst, *(abs(float(logits[best]) - logit) for best, logit in expected.top[at]))
            decisive += margin > DECISIVE
            if ours[at] != token:
                wrong = at if margin > DECISIVE else None
                break
            decisive_equal += margin > DECISIVE
            if at + 1 < len(expected.steps):
                ours.append(self.step([token], len(expected.ids) + at))
        else:
            at = len(expected.steps)
        return Verdict(expected.name, at, len(expected.steps), decisive, decisive_equal, wrong, worst, ours)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """`count` tokens after the prompt, whatever the oracle says."""
        self.reset()
        tokens = [self.prefill(ids)]
        while len(tokens) < count:
            tokens.append(self.step([tokens[-1]], len(ids) + len(tokens) - 1))
        return tokens
