"""Hostile bytes for every decoder, a part of them; and that the bench sees what it is there to see."""

from __future__ import annotations

import logging
import time

import pytest

from ppsmoke.errors import FrameError
from tests.lab.fuzz.target import MAX_INPUT_S, Outcome, Target, run_blocks
from tests.lab.fuzz_cluster import decoders

DECODERS = decoders()


@pytest.fixture(autouse=True)
def no_lines():
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def only_what_is_documented_came_out(outcome: Outcome) -> None:
    assert not outcome.violations, "\n".join(outcome.examples)
    assert outcome.accepted and outcome.refused, "both ways were taken"


@pytest.mark.parametrize("name", DECODERS)
def test_a_few_hostile_inputs_give_the_documented_error_or_none(name):
    only_what_is_documented_came_out(run_blocks(DECODERS[name], range(1), inputs_each=40))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_two_thousand_hostile_inputs_give_the_documented_error_or_none(name):
    only_what_is_documented_came_out(run_blocks(DECODERS[name], range(8), inputs_each=250, memory_every=8))


def test_a_block_gives_the_same_whoever_runs_it_and_when():
    together = run_blocks(DECODERS["signal"], range(3), inputs_each=50)
    apart = Outcome("signal")
    for block in (2, 0, 1):
        apart.add(run_blocks(DECODERS["signal"], [block], inputs_each=50))
    assert (apart.digest, apart.accepted, apart.refused) == (together.digest, together.accepted, together.refused)
    assert together.digest != run_blocks(DECODERS["signal"], range(1, 4), inputs_each=50).digest


def takes_long(data: bytes) -> None:
    until = time.thread_time() + MAX_INPUT_S + 0.01
    while time.thread_time() < until:
        pass


def holds_on_to(data: bytes) -> bytearray:
    return bytearray(1 << 20)


@pytest.mark.parametrize(
    ("decode", "says"),
    [
        (lambda data: {}[data], "KeyError"),
        (lambda data: int(b"x"), "ValueError: invalid literal"),
        (takes_long, "took 0."),
        (holds_on_to, "allocated 1,0"),
    ],
    ids=["a wrong error", "an undocumented one", "a hang", "an allocation"],
)
def test_the_bench_finds_a_decoder_that_does_what_none_may(decode, says):
    broken = Target("broken", decode, (FrameError,), [b"input"])
    outcome = run_blocks(broken, range(1), inputs_each=1)
    assert outcome.violations == 1 and says in outcome.examples[0]
