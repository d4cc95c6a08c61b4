"""The whole run as a user starts it: two local stages, a real answer, nothing left; and what it says when it cannot."""

import os
import socket
import subprocess
import sys

import pytest

from ppsmoke import testing
from ppsmoke.errors import DeadlineExceeded, SmokeError, StageError
from tests.lab.commands import ppsmoke
from tests.lab.expected import expected
from tests.lab.marked import marked
from tests.lab.paths import TINY_F32

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="a computing stage needs Python 3.11")


def test_two_stages_answer_what_llama_cpp_answers_and_nothing_is_left(tmp_path):
    said = ppsmoke("--model", str(TINY_F32), "--json", "--max-tokens", "16", "--prompt", "the quick brown fox",
                   "--wire-dtype", "float32", home=tmp_path)  # fmt: skip
    assert said.status == 0, said.stderr
    out = said.json
    oracle = expected(TINY_F32.name, "hello", "chat")
    assert out["prompt_token_ids"] == oracle["ids_plain"]
    assert out["token_ids"] == oracle["steps"]["ids"][: len(out["token_ids"])] and len(out["token_ids"]) >= 8
    assert out["ok"] is True and out["text"] and [stage["blocks"] for stage in out["stages"]] == [[0, 3], [3, 6]]
    assert out["timing"]["decode_tokens_per_s"] > 0 and out["timing"]["wire_ms"]["p50"] >= 0
    assert {link["to"] for link in out["links"]} >= {"stage-0-of-2", "stage-1-of-2"}
    assert os.path.isfile(out["log_path"])
    assert not marked(str(tmp_path)) and not os.listdir(tmp_path / "tmp")


@pytest.mark.slow
def test_the_main_job_says_hello_with_the_real_model(tmp_path):
    said = ppsmoke("--json", home=tmp_path)
    assert said.status == 0, said.stderr
    oracle = expected("smollm2", "hello", "chat")
    assert said.json["prompt_token_ids"] == oracle["ids_plain"]
    assert said.json["finish_reason"] in ("stop", "length") and said.json["text"]
    plain = ppsmoke("--wire-dtype", "float32", home=tmp_path)
    assert plain.status == 0 and plain.stdout == oracle["steps"]["text"] + "\n"
    assert not marked(str(tmp_path))


@pytest.mark.parametrize(
    ("prompt", "tokens", "finish"),
    [(90, 10, "length"), (99, 1, "length"), (96, 400, "length")],
)
@pytest.mark.slow
def test_a_prompt_and_its_answer_fill_the_context_exactly(prompt, tokens, finish, pipeline_of_100):
    answer = pipeline_of_100.ask("z" * (prompt - 1), raw=True, max_tokens=tokens)  # a token each, and the first, BOS
    assert len(answer.prompt_token_ids) == prompt
    assert len(answer.token_ids) == min(tokens, 100 - prompt) and answer.finish_reason == finish


@pytest.fixture(scope="module")
def pipeline_of_100():
    with testing.loopback(str(TINY_F32), 2, max_context=100, wire_dtype="float32") as pipeline:
        yield pipeline


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["z" * 99, "z" * 100, "z" * 1_000_000])
def test_a_prompt_that_does_not_fit_is_refused_before_any_compute_and_the_pipeline_lives(prompt, pipeline_of_100):
    with pytest.raises(StageError, match="context"):
        pipeline_of_100.ask(prompt, raw=True)
    assert pipeline_of_100.ask("the quick", raw=True, max_tokens=2).text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "named"),
    [
        ("x", -1, "--max-tokens -1"),
        ("x", "3", "str and str"),
        (b"x", 1, "bytes and int"),
        ("\ud800", 1, "UTF-8"),
        ("z" * 9_000_000, 1, "InferenceRequest.prompt: 9000000 bytes"),
    ],
)
def test_a_question_that_no_run_would_take_is_refused_alone_and_the_pipeline_lives(
    prompt, max_tokens, named, pipeline_of_100
):
    with pytest.raises(SmokeError, match=named):
        pipeline_of_100.ask(prompt, max_tokens=max_tokens)
    assert pipeline_of_100.ask("the quick", raw=True, max_tokens=2).text


@pytest.mark.slow
def test_more_stages_than_blocks_is_one_line_and_a_hint(tmp_path):
    said = ppsmoke("--model", str(TINY_F32), "--stages", "7", home=tmp_path)
    assert said.status == 1 and not said.stdout
    assert "7 stages" in said.error_lines[0] and "hint:" in said.error_lines[1] and "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("no.gguf", b"this is text and no model at all", "no GGUF"),
        ("empty.gguf", b"", "GGUF"),
        ("cut.gguf", None, "ends"),
    ],
)
@pytest.mark.slow
def test_a_file_that_is_no_model_is_refused_in_one_line(name, content, named, tmp_path):
    path = tmp_path / name
    path.write_bytes(TINY_F32.read_bytes()[:500_000] if content is None else content)
    said = ppsmoke("--model", str(path), home=tmp_path)
    assert said.status == 1 and named in said.error_lines[0] and "Traceback" not in said.stderr
    assert len(said.error_lines) <= 3


@pytest.mark.parametrize(
    "reference",
    [
        "no/such/file.gguf",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("smollm3:1b", "ftp://host/x.gguf", "http://host/x.gguf")
        ),
    ],
)
def test_a_model_that_is_no_path_name_or_url_is_refused_before_anything_starts(reference, tmp_path):
    said = ppsmoke("--model", reference, home=tmp_path)
    assert said.status == 1 and "hint:" in said.error_lines[1] and "rent" not in said.stderr


@pytest.mark.slow
def test_a_stdout_that_breaks_is_failure_after_everything_has_ended(tmp_path):
    here, there = socket.socketpair()
    with here, there:
        there.close()
        command = [sys.executable, "-m", "ppsmoke", "--model", str(TINY_F32), "--max-tokens", "4"]
        done = subprocess.run(command, stdout=here, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 1 and b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_stderr_that_cannot_be_written_hides_no_answer():
    command = [sys.executable, "-m", "ppsmoke", "--model", str(TINY_F32), "--max-tokens", "4"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=120)
    assert done.returncode == 0 and done.stdout


@pytest.mark.slow
def test_other_peoples_suites_get_a_pipeline_as_a_context_manager():
    with testing.loopback(TINY_F32, 3, wire_dtype="float32") as pipeline:
        one = pipeline.ask("the quick brown fox", max_tokens=16, raw=True)
        with pytest.raises(DeadlineExceeded):
            pipeline.ask("the quick brown fox", max_tokens=100, raw=True, within_s=0.01)
        two = pipeline.ask("the quick brown fox", max_tokens=16, raw=True)
    with pytest.raises(StageError, match="its block has ended"):
        pipeline.ask("too late")
    assert one == two and one.token_ids == expected(TINY_F32.name, "hello", "raw")["steps"]["ids"]
