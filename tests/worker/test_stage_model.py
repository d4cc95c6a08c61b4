"""The stage model against llama.cpp's answers: splits, chunks, the end of the context, rope_freqs, every type."""

from __future__ import annotations

import dataclasses

import pytest

from tests.lab.compute import DEVICE  # isort: skip  (before tinygrad is imported)

from ppsmoke.errors import InputError
from ppsmoke.worker import kernel_options, weights
from ppsmoke.worker.fetch import FileSource
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.llama import layer_range
from ppsmoke.worker.stage_model import ContextFull, StageModel, WrongPosition
from tests.lab.oracle import DATA, DECISIVE, LOGIT_TOLERANCE, Chain, expectations, logit_tolerance

TINY = "tiny-llama3-q8_0.gguf"
TINY_TYPES = sorted(path.name for path in DATA.glob("tiny*.gguf"))
LONG = next(expected for expected in expectations(TINY) if expected.name == "long/chat")
CONTEXT = len(LONG.ids) + len(LONG.steps) - 1  # the last token need not be fed: this just fits


@pytest.fixture(scope="module")
def chain() -> Chain:
    """The tiny model in two stages; one for all quick tests, as compiling takes seconds."""
    return Chain(DATA / TINY, 2, max_context=CONTEXT)


@pytest.mark.parametrize(
    ("total", "num_stages", "ranges"),
    [
        (30, 1, [(0, 30)]),
        (30, 2, [(0, 15), (15, 30)]),
        (16, 3, [(0, 5), (5, 10), (10, 16)]),
        (6, 5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6)]),
    ],
)
def test_blocks_are_split_by_the_specifications_formula(total, num_stages, ranges):
    assert [layer_range(total, stage, num_stages) for stage in range(num_stages)] == ranges


def test_two_stages_continue_every_prompt_as_llama_cpp_does(chain):
    verdicts = [chain.continuation(expected) for expected in expectations(TINY)]
    assert [verdict.name for verdict in verdicts if verdict.wrong is not None] == []
    assert max(verdict.worst_logit for verdict in verdicts) < LOGIT_TOLERANCE
    assert sum(verdict.decisive for verdict in verdicts) >= 90


def test_a_prompt_and_its_answer_may_fill_the_context_to_the_last_position(chain):
    """In odd steps, so that the last chunk is padded beyond the context: it must not write over what is read."""
    ids = LONG.ids + LONG.steps[:-1]
    assert len(ids) == CONTEXT and (CONTEXT - 5) % chain.stages[0].chunk not in (0, 1)
    chain.reset()
    for at in range(5):
        chain.step(ids[at : at + 1], at, sample=False)
    token = chain.prefill(ids, start=5)
    assert token == LONG.steps[-1] or LONG.margins[-1] <= DECISIVE
    padded = chain.logits()
    chain.reset()
    chain.prefill(ids[:-1])
    chain.step(ids[-1:], len(ids) - 1)
    assert abs(padded - chain.logits()).max() < 1e-3
    for stage in chain.stages[:1]:
        with pytest.raises(ContextFull, match=f"in a context of {CONTEXT}"):
            stage.forward(stage.embed([1]), position=CONTEXT)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65])
def test_a_prompt_in_chunks_is_the_prompt_token_by_token(chain, length):
    ids = LONG.ids[:length]
    chain.reset()
    for at in range(length):
        single = chain.step(ids[at : at + 1], at, sample=at == length - 1)
    one_by_one = chain.logits()
    chain.reset()
    assert chain.prefill(ids) == single
    assert abs(one_by_one - chain.logits()).max() < 1e-3


@pytest.mark.slow
def test_a_model_without_rope_freqs_answers_otherwise_after_some_hundred_tokens(chain):
    """The long prompt would catch it if the tensor were not applied, in any stage."""
    source = FileSource(DATA / TINY)
    gguf = Gguf.read(source)
    without = {name: info for name, info in gguf.tensors.items() if name != "rope_freqs.weight"}
    other = Chain(DATA / TINY, 1, max_context=CONTEXT, gguf=dataclasses.replace(gguf, tensors=without))
    assert other.continuation(LONG).worst_logit > 0.5


def test_a_position_that_is_not_the_number_of_cached_tokens_is_refused(chain):
    chain.reset()
    first = chain.stages[0]
    hidden = first.embed(LONG.ids[:3])
    first.forward(hidden, position=0)
    for wrong in (0, 2, 4):
        with pytest.raises(WrongPosition, match="3 tokens"):
            first.forward(hidden, position=wrong)
    assert first.length == 3


def test_a_stage_holds_its_blocks_and_the_embedding_where_it_is_used(chain):
    config = chain.stages[0].config
    per_block = sum(rows * (cols[0] if cols else 1) for rows, *cols in config.tensor_shapes(0).values())
    embedding = config.vocabulary * config.dim
    for stage in chain.stages:
        blocks = stage.blocks_range[1] - stage.blocks_range[0]
        assert blocks * per_block * 4 <= stage.weight_bytes <= 1.02 * 4 * (blocks * per_block + embedding + config.dim)


def test_more_stages_than_blocks_are_refused():
    source = FileSource(DATA / TINY)
    with pytest.raises(InputError, match="7 stages for a model of 6 blocks"):
        StageModel.load(
            source,
            Gguf.read(source),
            stage=0,
            num_stages=7,
            max_context=64,
            device=DEVICE,
            progress=lambda what, done, total: None,
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", TINY_TYPES)
def test_every_type_and_every_split_answers_as_llama_cpp(model):
    whole = None
    for stages in (1, 2, 3, 5):
        chain = Chain(DATA / model, stages)
        verdicts = [chain.continuation(expected) for expected in expectations(model)]
        assert [verdict.name for verdict in verdicts if verdict.wrong is not None] == []
        assert max(verdict.worst_logit for verdict in verdicts) < logit_tolerance(model)
        ours = [verdict.ours for verdict in verdicts]
        assert whole is None or ours == whole
        whole = ours


@pytest.mark.slow
def test_smollm2_in_two_stages_answers_every_prompt_as_llama_cpp():
    chain = Chain("smollm2:135m", 2)
    verdicts = [chain.continuation(expected) for expected in expectations("smollm2")]
    assert [verdict.name for verdict in verdicts if verdict.wrong is not None] == []
    assert max(verdict.worst_logit for verdict in verdicts) < LOGIT_TOLERANCE
    assert sum(verdict.decisive for verdict in verdicts) >= 580


@pytest.mark.slow
def test_the_layout_of_a_gpu_answers_as_llama_cpp_too(monkeypatch):
    """Rows, half weights, one graph for all blocks, plain kernels where an option does not fit; here on the CPU."""
    original = weights.Placement.__init__

    def like_a_gpu(self, device: str) -> None:
        original(self, device)
        self.on_cpu, self.weight_dtype = False, "float16"

    monkeypatch.setattr(weights.Placement, "__init__", like_a_gpu)
    monkeypatch.setattr(kernel_options, "_enabled", True)
    model = "tiny-llama3-f16.gguf"
    for _ in range(2):  # compiled, then read from the store
        chain = Chain(DATA / model, 2, max_context=CONTEXT)
        verdicts = [chain.continuation(expected) for expected in expectations(model)]
        assert [verdict.name for verdict in verdicts if verdict.wrong is not None] == []
        assert max(verdict.worst_logit for verdict in verdicts) < 0.1  # half weights, half products in prefill
