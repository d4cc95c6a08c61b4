"""Reading a remote file in ranges: what is cached, what is tried again, what is refused."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys

import pytest

from ppsmoke.errors import FetchError, GgufError
from ppsmoke.models import Url
from ppsmoke.worker import cache, http_source
from ppsmoke.worker.fetch import open_model
from ppsmoke.worker.gguf import Gguf
from ppsmoke.worker.http_source import SEGMENT_BYTES, HttpSource
from tests.lab.range_server import hang_up_after, refuse_with, serving
from tests.worker.sources import DATA, ignore

SIZE = 5 * SEGMENT_BYTES + 12_345
REMOTE = random.Random(3).randbytes(SIZE)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "ppsmoke"


@pytest.fixture
def server():
    with serving(REMOTE) as served:
        yield served


@pytest.fixture
def no_pauses(monkeypatch):
    """Back-off without waiting; what would have been waited for is recorded."""
    pauses: list[float] = []

    class Impatient(HttpSource):
        def __init__(self, *args, **kwargs):
            self._patience = pauses
            super().__init__(*args, **kwargs)

        @property
        def _pause(self):
            return pauses.append

        @_pause.setter
        def _pause(self, _):
            pass

    monkeypatch.setattr("tests.worker.test_http_source.HttpSource", Impatient)
    return pauses


def opened(server, **more):
    return HttpSource(Url(server.url), progress=ignore, **more)


def test_any_range_is_read_and_a_second_start_asks_for_nothing(server):
    first = opened(server)
    assert first.size == SIZE
    for offset, length in [(0, 10), (SIZE - 7, 7), (SEGMENT_BYTES - 3, 6), (100, 3 * SEGMENT_BYTES), (5, 0)]:
        assert first.read(offset, length) == REMOTE[offset : offset + length]
    asked, brought = len(server.requests), first.bytes_read
    first.close()
    second = opened(server)
    assert second.read(100, 3 * SEGMENT_BYTES) == REMOTE[100 : 100 + 3 * SEGMENT_BYTES]
    assert second.bytes_read == 0 and len(server.requests) == asked
    assert brought < SIZE  # the segment before the last was never needed


def test_only_whole_segments_that_are_missing_are_asked_for_in_few_requests(server):
    source = opened(server)
    source.read(2 * SEGMENT_BYTES, 5)
    source.prefetch([(0, 10), (SEGMENT_BYTES, 10), (3 * SEGMENT_BYTES + 9, SEGMENT_BYTES), (SIZE - 1, 1)])
    assert server.requests == [
        (0, SEGMENT_BYTES),
        (2 * SEGMENT_BYTES, 3 * SEGMENT_BYTES),
        (SEGMENT_BYTES, 2 * SEGMENT_BYTES),
        (3 * SEGMENT_BYTES, SIZE),
    ]
    assert source.bytes_read == SIZE
    assert source.read(0, SIZE) == REMOTE and len(server.requests) == 4


def test_a_window_is_bounded_so_that_others_may_take_turns(server, monkeypatch):
    monkeypatch.setattr(http_source, "WINDOW_SEGMENTS", 2)
    opened(server).read(0, SIZE)
    assert [-(-(end - begin) // SEGMENT_BYTES) for begin, end in server.requests] == [1, 2, 2, 1]


def test_the_cached_file_has_holes(server, cache_folder):
    opened(server).read(4 * SEGMENT_BYTES, 1)
    (entry,) = cache.entries()
    assert entry.name.endswith("-model.gguf") and 2 * SEGMENT_BYTES <= entry.bytes < 3 * SEGMENT_BYTES
    assert (entry.path / "data").stat().st_size == SIZE


def test_a_gguf_is_opened_by_its_url_and_its_header_costs_one_request():
    data = (DATA / "tiny256-llama3-q4_k.gguf").read_bytes()
    with serving(data) as server:
        source = open_model(server.url, progress=ignore)
        model = Gguf.read(source)
        assert len(server.requests) == 1
        info = model.tensors["blk.3.ffn_down.weight"]
        assert source.read(info.offset, info.nbytes) == data[info.offset : info.offset + info.nbytes]


def test_what_the_server_has_may_be_no_gguf_and_is_named_by_its_url_without_the_query():
    with serving(b"<html>" + bytes(1000), path="/a/b?token=secret") as server:
        with pytest.raises(GgufError, match=r"^http://127.0.0.1:\d+/a/b: this is no GGUF") as caught:
            Gguf.read(open_model(server.url, progress=ignore))
        assert "secret" not in str(caught.value)


def test_requests_carry_nothing_but_the_range_and_our_name(server):
    opened(server)
    assert set(server.headers[0]) == {"Accept-Encoding", "Host", "User-Agent", "Connection", "Range"}


def test_a_connection_that_breaks_is_resumed_at_the_first_missing_segment(server, no_pauses):
    source = opened(server)
    server.faults = [hang_up_after(2 * SEGMENT_BYTES + 99), hang_up_after(0), hang_up_after(7)]
    assert source.read(SEGMENT_BYTES, SIZE - SEGMENT_BYTES) == REMOTE[SEGMENT_BYTES:]
    assert [begin // SEGMENT_BYTES for begin, _ in server.requests] == [0, 1, 3, 3, 3]
    assert source.bytes_read == SIZE and len(no_pauses) == 2


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_asked_again_with_growing_pauses_and_then_given_up(server, no_pauses, code):
    source = opened(server)
    server.faults = 2 * [refuse_with(code)]
    source.read(SEGMENT_BYTES, 1)
    assert len(no_pauses) == 2
    server.always = refuse_with(code)
    with pytest.raises(FetchError, match=f"the server answers {code}, 5 times in a row at byte {3 * SEGMENT_BYTES}"):
        source.read(3 * SEGMENT_BYTES, 1)
    assert len(server.requests) == 1 + 3 + 5
    assert all(0.25 <= pause <= 8 for pause in no_pauses)


def test_a_server_that_is_gone_is_given_up_with_its_name(no_pauses):
    with serving(REMOTE) as server:
        pass
    with pytest.raises(FetchError, match=r"model.gguf: no connection \(.*refused.*\), 5 times") as caught:
        opened(server)
    assert "network" in caught.value.hint


def test_a_server_that_drips_is_given_up(server, no_pauses, monkeypatch):
    source = opened(server)
    monkeypatch.setattr(http_source, "SEGMENT_DEADLINE_S", 0.0)
    with pytest.raises(FetchError, match="less than 1 MiB came in 0 s, 5 times"):
        source.read(SEGMENT_BYTES, 1)


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410, 416])
def test_a_refusal_is_final(server, no_pauses, code):
    server.always = refuse_with(code)
    with pytest.raises(FetchError, match=f"the server answers {code}"):
        opened(server)
    assert len(server.requests) == 1 and not no_pauses


def wrong_range(text: str):
    def fault(handler, begin, end):
        handler.answer(begin, end, content_range=text)
        return True

    return fault


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("nonsense", "without saying which"),
        ("bytes 0-9/*", "without saying which"),
        ("bytes 9-3/100", "impossible range"),
        (f"bytes 5-{SEGMENT_BYTES + 4}/{SIZE}", "other bytes than it was asked for"),
        (f"bytes 0-{SEGMENT_BYTES - 2}/{SIZE}", "other bytes than it was asked for"),
    ],
)
def test_a_server_that_lies_about_ranges_is_refused(server, text, cause):
    server.always = wrong_range(text)
    with pytest.raises(FetchError, match=cause):
        opened(server)
    assert cache.entries() == []


def test_a_server_that_knows_no_ranges_is_refused_with_the_way_out(server):
    server.always = refuse_with(200)
    with pytest.raises(FetchError, match="does not answer byte ranges") as caught:
        opened(server)
    assert "path" in caught.value.hint


def test_a_file_that_changed_on_the_server_is_refused(server):
    source = opened(server)
    server.etag = '"two"'
    with pytest.raises(FetchError, match="has changed on the server") as caught:
        source.read(SEGMENT_BYTES, 1)
    assert "cache clear" in caught.value.hint
    server.etag = 'W/"two"'  # weak ones say nothing about bytes
    source.read(SEGMENT_BYTES, 1)
    server.data = REMOTE + b"x"
    with pytest.raises(FetchError, match="has changed on the server"):
        source.read(3 * SEGMENT_BYTES, 1)


def test_a_file_of_another_length_than_the_catalogue_says_is_refused(server):
    with pytest.raises(FetchError, match=f"has {SIZE} bytes instead of 7"):
        opened(server, expected_bytes=7)
    assert opened(server, expected_bytes=SIZE).size == SIZE


def test_redirects_are_followed_but_never_to_plain_http_elsewhere(server, no_pauses):
    with serving(b"") as front:
        front.always = refuse_with(302, Location=server.url)
        assert opened(front).read(0, 9) == REMOTE[:9]
        for target in ("http://example.invalid/model.gguf", "http://10.0.0.1/x", "ftp://127.0.0.1/x"):
            front.always = refuse_with(302, Location=target)
            with pytest.raises(FetchError, match=r"redirects to (http|ftp)://|answers 302"):
                HttpSource(Url(front.url + "?other"), progress=ignore)
        front.always = refuse_with(302, Location=front.url)
        with pytest.raises(FetchError, match="answers 302"):
            HttpSource(Url(front.url + "?loop"), progress=ignore)


@pytest.mark.parametrize("broken", ["data", "have", "meta.json"])
def test_a_cache_entry_with_a_damaged_file_is_begun_anew(server, broken):
    opened(server).close()
    (entry,) = cache.entries()
    (entry.path / broken).write_bytes(b"{}")
    assert opened(server).read(0, SIZE) == REMOTE


@pytest.mark.slow
def test_processes_that_read_the_same_file_at_once_fetch_each_segment_once(server):
    script = (
        "import sys\nfrom ppsmoke.worker.fetch import open_model\n"
        "source = open_model(sys.argv[1], progress=lambda *_: None)\n"
        "sys.stdout.buffer.write(source.read(0, source.size))\nsys.stdout.flush()\nsys.stdin.read()"
    )
    run = [sys.executable, "-c", script, server.url]
    children = [subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for child in children:  # none ends before all have read: no one's turn lasts as long as another's life
            assert child.stdout.read(SIZE) == REMOTE
    finally:
        for child in children:
            child.communicate(timeout=60)
    assert sum(end - begin for begin, end in server.requests) == SIZE


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot be written") as caught:
        opened(server)
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_full_disk_is_named_and_what_came_before_is_kept(server, monkeypatch):
    source = opened(server)
    pwrite, written = os.pwrite, 0

    def full(fd, data, offset):
        nonlocal written
        written += len(data)
        if len(data) > 1 and written > 2 * SEGMENT_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FetchError, match="no space left for the cache"):
        source.read(0, SIZE)
    monkeypatch.setattr(os, "pwrite", pwrite)
    asked = len(server.requests)
    assert source.read(SEGMENT_BYTES, 9) == REMOTE[SEGMENT_BYTES : SEGMENT_BYTES + 9]
    assert len(server.requests) == asked


def test_reading_beyond_the_end_is_refused(server):
    with pytest.raises(FetchError, match="were asked for"):
        opened(server).read(SIZE - 1, 2)


def test_progress_tells_bytes_brought_of_bytes_planned(server):
    seen = []
    source = HttpSource(Url(server.url), progress=lambda *report: seen.append(report))
    source.prefetch([(SEGMENT_BYTES, 2 * SEGMENT_BYTES)])
    assert seen == [
        ("reading model.gguf", 2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES),
        ("reading model.gguf", 3 * SEGMENT_BYTES, 3 * SEGMENT_BYTES),
    ]


def test_the_cache_is_cleared_but_for_what_a_process_reads(server):
    source = opened(server)
    freed, left = cache.clear()
    assert (freed, [entry.name for entry in left]) == (0, [cache.entries()[0].name])
    source.close()
    freed, left = cache.clear()
    assert freed >= SEGMENT_BYTES and left == [] and cache.entries() == []
    assert opened(server).read(0, 9) == REMOTE[:9]
