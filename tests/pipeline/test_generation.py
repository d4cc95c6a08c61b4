"""What the exit keeps of a request: when it stops, and where the time is said to have gone."""

from __future__ import annotations

import json

import pytest

from ppsmoke.pipeline.generation import Generation


def generation(max_tokens: int) -> Generation:
    return Generation(7, "0" * 16 + "/orchestrator", (5, 6, 7), max_tokens, frozenset({2, 4}), began_s=100.0)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "finish", "text_ids"),
    [
        ([9, 8], 2, "length", [9, 8]),
        ([9, 2], 2, "stop", [9]),  # the last one allowed is also an end: it is one
        ([9, 4], 5, "stop", [9]),
        ([2], 5, "stop", []),
        ([9], 1, "length", [9]),
    ],
)
def test_an_answer_ends_with_an_end_of_generation_token_or_with_its_length(tokens, max_tokens, finish, text_ids):
    answer = generation(max_tokens)
    verdicts = [answer.sampled(token, 101.0) for token in tokens]
    assert verdicts == [None] * (len(tokens) - 1) + [finish]
    assert (answer.token_ids, answer.text_token_ids()) == (tokens, text_ids)
    assert answer.next_position == 3 + len(tokens) - 1


def test_each_token_has_its_own_wall_time_and_each_stage_its_share():
    answer = generation(3)
    answer.computed((1000, 2000))
    answer.computed((1100, 2100))  # a prefill of two chunks
    assert answer.sampled(9, 100.5) is None
    answer.computed((10, 20))
    answer.sampled(8, 100.75)
    answer.computed((11, 21))
    answer.sampled(3, 101.0)
    response = answer.response("text")
    assert json.loads(response.timings_json) == {
        "prefill_us": 500_000,
        "token_us": [500_000, 250_000, 250_000],
        "stage_us": [[2100, 4100], [10, 20], [11, 21]],
    }
    assert (response.token_ids, response.prompt_token_ids, response.text) == ((9, 8, 3), (5, 6, 7), "text")
