"""A model on an https server, through the whole run: redirected, cut once, brought in pieces and brought only once."""

from __future__ import annotations

import sys

import pytest

from ppsmoke.worker.http_source import SEGMENT_BYTES
from tests.lab.commands import ppsmoke
from tests.lab.range_server import (
    answer_well,
    cut,
    hang_up_after,
    resumptions,
    sent_twice,
    serving_https_with_a_redirect,
    trusting,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="a computing stage needs Python 3.11"),
]
FEW = ("--max-tokens", "4", "--max-context", "64", "--raw", "--json")


@pytest.fixture(scope="module")
def model() -> bytes:
    pytest.importorskip("numpy")
    from tests.lab.tiny_gguf import TinyLlama

    frequencies = [1.0] * 24 + [8.0] * 8
    return TinyLlama(blocks=8, width=256, feed_forward=512, type="F16", rope_freqs=frequencies).to_bytes()


def test_two_stages_fetch_a_redirected_file_in_parts_and_resume_what_was_cut_and_then_have_it(tmp_path, model):
    partial = SEGMENT_BYTES // 2 + 77
    with serving_https_with_a_redirect(model) as (front, store):
        environment = trusting({"XDG_CACHE_HOME": str(tmp_path / "cache")})
        store.faults = [answer_well(), hang_up_after(SEGMENT_BYTES + partial)]
        said = ppsmoke("--model", front.url, *FEW, home=tmp_path, environment=environment)
        assert said.status == 0, said.stderr
        out = said.json
        fetched = [stage["bytes_read"] for stage in out["stages"]]
        assert out["ok"] is True and 1 <= len(out["token_ids"]) <= 4
        assert len(fetched) == 2 and all(0 < count < len(model) for count in fetched) and sum(fetched) <= len(model)
        assert len(cut(store)) == 1 and len(resumptions(store)) == 1
        assert sent_twice(store.sent) == partial
        assert sum(end - begin for begin, end in store.sent) == sum(fetched) + partial
        assert len(front.requests) == len(store.requests) and "signature" not in said.stderr + said.stdout
        asked = len(store.requests)
        again = ppsmoke("--model", front.url, *FEW, home=tmp_path, environment=environment)
        assert again.status == 0 and again.json["token_ids"] == out["token_ids"]
        assert [stage["bytes_read"] for stage in again.json["stages"]] == [0, 0]
        assert len(front.requests) == len(store.requests) == asked


def test_a_server_whose_certificate_nobody_vouches_for_ends_the_run_with_the_way_out(tmp_path, model):
    with serving_https_with_a_redirect(model) as (front, store):
        environment = {name: text for name, text in trusting({}).items() if name != "SSL_CERT_FILE"}
        environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        said = ppsmoke("--model", front.url, *FEW, home=tmp_path, environment=environment)
        assert said.status == 1 and not store.requests
        assert "self-signed certificate" in said.stderr and "SSL_CERT_FILE" in said.stderr
