"""The worker's JSON loop: the ready line, a prompt through two stages, everything that can be asked wrongly."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest

from tests.lab.compute import DEVICE  # isort: skip  (before tinygrad is imported)

from ppsmoke.worker.__main__ import serve
from tests.lab.oracle import DATA, DECISIVE, expectations

TINY = "tiny-llama3-q8_0.gguf"
HELLO = next(expected for expected in expectations(TINY) if expected.name == "hello/raw")
PROMPT = "the quick brown fox"
CONTEXT = 430  # that of test_stage_model: the compiled steps are shared through the store
ZEROS = base64.b64encode(bytes(2 * 64 * 4)).decode()  # two positions of the tiny model in float32


def served(stage: int, num_stages: int, *lines: Any, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and all replies of a worker that is given these lines."""
    requests = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    replies = io.BytesIO()
    settings = {
        "STAGE": str(stage),
        "NUM_STAGES": str(num_stages),
        "MODEL": str(DATA / TINY),
        "PPSMOKE_NODE_DEVICE": DEVICE,
        "PPSMOKE_NODE_MAX_CONTEXT": str(CONTEXT),
        "PPSMOKE_NODE_WIRE_DTYPE": "float32",
        "CACHELEVEL": "2",  # tinygrad is imported already; only its environment counts
    }
    status = serve(io.BytesIO(requests), replies, settings | environment)
    return status, [json.loads(line) for line in replies.getvalue().splitlines()]


def answers(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [reply for reply in replies if "status" not in reply]


def test_a_prompt_goes_through_two_workers_to_the_oracles_token():
    status, first = served(
        0,
        2,
        {"op": "tokenize", "request_id": 1, "prompt": PROMPT, "raw": True},
        {"op": "embed_and_forward", "request_id": 2, "tokens": HELLO.ids, "position": 0},
        {"op": "decode_step", "request_id": 3, "token_id": HELLO.steps[0], "position": len(HELLO.ids)},
        {"op": "reset", "request_id": 4},
    )
    assert status == 0
    ready = next(reply for reply in first if reply.get("status") == "ready")
    assert (ready["stage"], ready["blocks"], ready["total_blocks"], ready["hidden_dim"]) == (0, [0, 3], 6, 64)
    assert (ready["chunk"], ready["context"], ready["device"]) == (32, CONTEXT, "CPU")
    assert ready["model"] | {"name": ""} == {"name": "", "sha256": None, "blocks": 6, "context": 8192}
    assert ready["load_s"] > 0 and ready["warmup_s"] >= 0 and ready["peak_rss_bytes"] > ready["weight_bytes"] > 0
    assert len(ready["fingerprint"]) == 64 and ready["eog"] == sorted(set(ready["eog"]))
    loading = [reply for reply in first if reply.get("status") == "loading"]
    assert any(0 < reply["done"] == reply["total"] for reply in loading)
    tokenized, prompt, step, reset = answers(first)
    assert tokenized["tokens"] == HELLO.ids
    assert (prompt["seq_len"], prompt["dtype"], step["seq_len"]) == (len(HELLO.ids), "float32", 1)
    assert reset["ok"] is True and [reply["request_id"] for reply in answers(first)] == [1, 2, 3, 4]
    assert all(reply["compute_us"] >= 0 for reply in answers(first)) and prompt["compute_us"] > 0

    hidden = {name: prompt[name] for name in ("hidden_b64", "dtype", "seq_len")}
    next_hidden = {name: step[name] for name in ("hidden_b64", "dtype", "seq_len")}
    status, last = served(
        1,
        2,
        {"op": "forward_and_sample", "request_id": "a", "position": 0, "sample": False, **hidden},
        {"op": "reset"},
        {"op": "forward_and_sample", "request_id": 5, "position": 0, "sample": True, **hidden},
        {"op": "forward_and_sample", "request_id": 6, "position": len(HELLO.ids), **next_hidden},
        {"op": "detokenize", "request_id": 7, "tokens": HELLO.ids[1:]},
    )
    unsampled, _, sampled, second, text = answers(last)
    assert status == 0 and unsampled["token_id"] is None and unsampled["request_id"] == "a"
    assert HELLO.margins[0] > DECISIVE and HELLO.margins[1] > DECISIVE
    assert [sampled["token_id"], second["token_id"]] == HELLO.steps[:2]
    assert text["text"] == PROMPT


def token_request(**fields: Any) -> dict[str, Any]:
    return {"op": "embed_and_forward", "request_id": 9, "tokens": [1], "position": 0} | fields


FIRST_STAGE_REFUSES = [
    (b"{not json\n", "bad_json"),
    (b"\xff\xfe\n", "bad_json"),
    (b"\n", "bad_json"),
    (b"[" * 100_000 + b"\n", "bad_json"),
    ([1, 2], "bad_request"),
    ("reset", "bad_request"),
    (None, "bad_request"),
    ({}, "unknown_op"),
    ({"op": 7}, "unknown_op"),
    ({"op": ["reset"]}, "unknown_op"),
    ({"op": "quit"}, "unknown_op"),
    ({"op": "forward"}, "unknown_op"),
    ({"op": "forward_and_sample"}, "unknown_op"),
    ({"op": "embed_and_sample", "tokens": [1], "position": 0}, "unknown_op"),
    ({"op": "detokenize", "tokens": [1]}, "unknown_op"),
    ({"op": "tokenize"}, "bad_request"),
    ({"op": "tokenize", "prompt": 5, "raw": True}, "bad_request"),
    ({"op": "tokenize", "prompt": "x", "raw": 1}, "bad_request"),
    (token_request(tokens=None), "bad_request"),
    (token_request(tokens="1"), "bad_request"),
    (token_request(tokens=[True]), "bad_request"),
    (token_request(tokens=[1.0]), "bad_request"),
    (token_request(tokens=[[1]]), "bad_request"),
    (token_request(tokens=[]), "tokens"),
    (token_request(tokens=[-1]), "tokens"),
    (token_request(tokens=[512]), "tokens"),
    (token_request(tokens=[1 << 80]), "tokens"),
    (token_request(tokens=[1] * 33), "tokens"),
    (token_request(position=None), "bad_request"),
    (token_request(position=False), "bad_request"),
    (token_request(position=0.0), "bad_request"),
    (token_request(position=-1), "position"),
    (token_request(position=1), "position"),
    (token_request(position=1 << 80), "position"),
    ({"op": "decode_step", "position": 0}, "bad_request"),
    ({"op": "decode_step", "position": 0, "token_id": True}, "bad_request"),
    ({"op": "decode_step", "position": 0, "token_id": 512}, "tokens"),
]


def hidden_request(**fields: Any) -> dict[str, Any]:
    good = {"op": "forward_and_sample", "hidden_b64": ZEROS, "dtype": "float32", "seq_len": 2, "position": 0}
    return good | {"sample": True} | fields


LAST_STAGE_REFUSES = [
    (hidden_request(hidden_b64=None), "bad_request"),
    (hidden_request(hidden_b64="!!!!"), "hidden"),
    (hidden_request(hidden_b64=ZEROS[:-4]), "hidden"),
    (hidden_request(hidden_b64=ZEROS + "AAAA"), "hidden"),
    (hidden_request(hidden_b64=""), "hidden"),
    (hidden_request(dtype="bfloat16"), "hidden"),
    (hidden_request(dtype="int8"), "hidden"),
    (hidden_request(dtype=None), "hidden"),
    (hidden_request(dtype=["float32"]), "hidden"),
    (hidden_request(seq_len=1), "hidden"),
    (hidden_request(seq_len=0), "hidden"),
    (hidden_request(seq_len=-2), "hidden"),
    (hidden_request(seq_len=33), "hidden"),
    (hidden_request(seq_len="2"), "bad_request"),
    (hidden_request(position=3), "position"),
    (hidden_request(sample="yes"), "bad_request"),
    ({"op": "detokenize", "tokens": [512]}, "tokens"),
    ({"op": "detokenize", "tokens": [None]}, "bad_request"),
    ({"op": "embed_and_forward", "tokens": [1], "position": 0}, "unknown_op"),
]


@pytest.mark.parametrize(
    ("stage", "refused", "good"),
    [(0, FIRST_STAGE_REFUSES, token_request(request_id=99)), (1, LAST_STAGE_REFUSES, hidden_request(request_id=99))],
)
def test_a_wrong_request_is_answered_with_its_kind_and_the_worker_lives_on(stage, refused, good):
    status, replies = served(stage, 2, *(line for line, _ in refused), good)
    *errors, answer = answers(replies)
    for (line, kind), reply in zip(refused, errors, strict=True):
        assert reply.get("error", {}).get("kind") == kind, (line, reply)
        assert 0 < len(reply["error"]["message"]) < 300
        assert reply["request_id"] == (line.get("request_id") if isinstance(line, dict) else None)
    assert status == 0 and answer["request_id"] == 99 and "error" not in answer


@pytest.mark.slow
def test_a_worker_alone_embeds_and_samples_and_says_when_its_context_is_full():
    chunks = [HELLO.ids[:5], HELLO.ids[5:]]
    full = [{"op": "embed_and_sample", "tokens": [1] * 32, "position": 32 * n, "sample": False} for n in range(14)]
    status, replies = served(
        0,
        1,
        {"op": "embed_and_sample", "tokens": chunks[0], "position": 0, "sample": False},
        {"op": "embed_and_sample", "tokens": chunks[1], "position": 5, "sample": True},
        {"op": "reset"},
        *full,
        {"op": "embed_and_sample", "tokens": [1] * (CONTEXT - 13 * 32), "position": 13 * 32, "sample": True},
        {"op": "embed_and_sample", "tokens": [1], "position": CONTEXT, "sample": True},
    )
    first, second, _, *filled, last, beyond = answers(replies)
    assert status == 0 and first["token_id"] is None and second["token_id"] == HELLO.steps[0]
    assert [reply.get("error", {}).get("kind") for reply in filled] == [None] * 13 + ["context"]
    assert isinstance(last["token_id"], int) and beyond["error"]["kind"] == "context"


@pytest.mark.parametrize(
    ("environment", "kind", "named"),
    [
        ({"MODEL": ""}, "input", "MODEL"),
        ({"MODEL": "/nowhere/model.gguf"}, "input", "/nowhere/model.gguf"),
        ({"MODEL": str(DATA / "tiny.json")}, "model", "no GGUF"),
        ({"STAGE": "2"}, "input", "STAGE"),
        ({"STAGE": "-1"}, "input", "STAGE"),
        ({"NUM_STAGES": ""}, "input", "NUM_STAGES"),
        ({"NUM_STAGES": "7"}, "input", "7 stages for a model of 6 blocks"),
        ({"PPSMOKE_NODE_WIRE_DTYPE": "int8"}, "input", "int8"),
        ({"PPSMOKE_NODE_MAX_CONTEXT": "0"}, "input", "MAX_CONTEXT"),
        ({"PPSMOKE_NODE_DEVICE": "TPU"}, "environment", "TPU"),
        ({"PPSMOKE_NODE_DEVICE": "CPU", "PATH": "/nowhere", "CC": ""}, "environment", "clang"),
    ],
)
def test_a_stage_that_cannot_be_loaded_says_why_in_one_line_and_exits_1(environment, kind, named, capsys):
    status, replies = served(0, 2, **environment)
    assert status == 1
    assert replies[-1]["status"] == "failed" and replies[-1]["error"]["kind"] == kind
    assert named in replies[-1]["error"]["message"] and "\n" not in replies[-1]["error"]["message"]
    assert set(replies[-1]["error"]) == {"kind", "message", "hint"}
