"""The record of a run: what `--json` says, and that nothing in it is invented."""

import json
from dataclasses import dataclass, field

import pytest

from ppsmoke.errors import StageError
from ppsmoke.report.summary import RunRecord, percentile


@dataclass
class Answer:
    text: str = "Hi"
    token_ids: list = field(default_factory=lambda: [5, 6, 7])
    prompt_token_ids: list = field(default_factory=lambda: [1, 2])
    finish_reason: str = "stop"
    timings_json: str = json.dumps(
        {
            "prefill_us": 100_000,
            "token_us": [100_000, 20_000, 40_000],
            "stage_us": [[60_000, 30_000], [8_000, 7_000], [9_000, 11_000]],
        }
    )


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([3], 99, 3), ([4, 1, 3, 2], 50, 2), ([4, 1, 3, 2], 75, 3), (range(1, 101), 99, 99)],
)
def test_a_percentile_is_a_value_that_was_measured(values, percent, expected):
    assert percentile(list(values), percent) == expected


def test_before_anything_is_known_every_number_is_null():
    record = RunRecord(run_id="r", model_name="m", num_stages=2)
    said = record.to_json()
    assert said["schema"] == 1 and said["ok"] is False and said["text"] is None
    assert [stage["stage"] for stage in said["stages"]] == [0, 1]
    assert said["stages"][0]["load_s"] is None
    assert said["timing"]["decode_tokens_per_s"] is None and said["timing"]["token_ms"] == {"p50": None, "p99": None}
    assert "error" not in said
    json.dumps(said)


def test_a_tokens_time_is_split_into_the_stages_and_the_wire():
    record = RunRecord(run_id="r", model_name="m", num_stages=2)
    record.take_answer(Answer())
    timing = record.to_json()["timing"]
    assert timing["prefill_s"] == 0.1 and timing["decode_s"] == 0.06
    assert timing["decode_tokens_per_s"] == pytest.approx(33.333, abs=0.001)
    assert timing["token_ms"] == {"p50": 20.0, "p99": 40.0}
    assert timing["stage_ms"] == [8.0, 7.0]
    assert timing["wire_ms"] == {"p50": 5.0, "p99": 20.0}


def test_a_failure_keeps_what_was_known_and_adds_its_cause():
    record = RunRecord(run_id="r", model_name="m", num_stages=1)
    record.stage_info[0] = {"device": "CPU", "blocks": [0, 6], "model": {"sha256": None}, "total_blocks": 6}
    record.error = StageError("killed by SIGKILL", phase="ask", stage=0, hint="look at the log")
    said = record.to_json()
    assert said["ok"] is False and said["stages"][0]["device"] == "CPU" and said["model"]["blocks"] == 6
    assert said["error"] == {"phase": "ask", "stage": 0, "cause": "killed by SIGKILL", "hint": "look at the log"}


def test_an_answer_followed_by_a_failed_clean_up_is_not_ok_but_is_kept():
    record = RunRecord(run_id="r", model_name="m", num_stages=1)
    record.take_answer(Answer())
    record.error = StageError("left over", phase="destroy")
    said = record.to_json()
    assert said["ok"] is False and said["text"] == "Hi"


def test_one_token_has_no_decode_speed_and_odd_timings_count_as_unknown():
    record = RunRecord(run_id="r", model_name="m", num_stages=1)
    record.take_answer(Answer(token_ids=[5], timings_json='{"prefill_us": 5, "token_us": [5], "stage_us": [[2, 1]]}'))
    assert record.to_json()["timing"]["decode_tokens_per_s"] is None
    assert record.lines()
    record.take_answer(Answer(timings_json="not json"))
    assert record.to_json()["timing"]["prefill_s"] is None
