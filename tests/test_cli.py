"""The command line: what it refuses, how it says so, and that nothing of it is a traceback."""

import errno
import os
import subprocess
import sys

import pytest

from ppsmoke import __version__, settings
from ppsmoke.cli import main
from ppsmoke.errors import os_hint
from ppsmoke.package import own_command
from ppsmoke.worker import device
from tests.lab.commands import ppsmoke
from tests.lab.paths import TINY_F32


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-tokens", "0"], "--max-tokens"),
        (["--stages", "0"], "--stages"),
        (["--wire-dtype", "int4"], "--wire-dtype"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--no-such-option"], "--no-such-option"),
        (["--model", ""], "--model"),
        (["-v", "-q"], "-q"),
        (["--device", "FOO"], "CPU, CUDA"),
        (["--vastai", "--dry-run", "--device", "CUDA:x"], "CPU, CUDA"),
        (["--stages", "3", "reap"], "--stages means nothing to reap"),
        (["--max-usd", "2", "ls"], "--max-usd means nothing to ls"),
        (["--json", "package"], "--json means nothing to package"),
        (["--yes", "cache", "clear"], "--yes means nothing to cache"),
        (["boot"], "PPSMOKE_NODE_SECRET"),
        (["--vastai", "cache"], "--vastai means nothing to cache"),
        (["--max-usd", "-1"], "--max-usd without --vastai"),
        (["--disk", "20"], "--disk without --vastai"),
        (["--max-tokens", "1000000"], "--max-tokens 1000000 is"),
    ],
)
def test_a_command_that_cannot_be_meant_is_usage_and_starts_nothing(arguments, named, capsys, monkeypatch):
    monkeypatch.setattr("ppsmoke.smoke.run", None)
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert status == 2 and named in said.err and not said.out
    assert "Traceback" not in said.err


def test_a_prompt_on_stdin_that_is_no_utf8_is_refused_by_its_byte(tmp_path):
    said = ppsmoke("--prompt", "-", home=tmp_path, stdin=b"caf\xe9")
    assert said.status == 1 and "byte 3" in said.stderr and len(said.error_lines) <= 3


def test_an_empty_stdin_is_no_prompt(tmp_path):
    said = ppsmoke("--prompt", "-", home=tmp_path, stdin=b"")
    assert said.status == 1 and "stdin held no prompt" in said.stderr and "hint:" in said.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a namespace of its own needs root")
def test_a_machine_that_cannot_reach_itself_is_told_how_to(tmp_path):
    command, environment = own_command()
    environment = {**os.environ, **environment, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    command = ["unshare", "-n", *command, "--model", str(TINY_F32)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1 and "cannot reach itself" in said.stderr and "ip link set lo up" in said.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "x"), "ulimit -n"),
        (OSError(errno.ENOMEM, "x"), "memory"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOSPC, "x"), "disk"),
        (OSError(errno.ENOENT, "x"), ""),
        (ValueError("x"), ""),
    ],
)
def test_a_resource_that_the_machine_refuses_is_told_as_such(error, words):
    assert words in os_hint(error) and bool(words) == bool(os_hint(error))


def test_the_known_devices_are_those_of_a_worker():
    assert settings.DEVICES == device.DEVICES


def test_help_names_every_option_and_subcommand_and_the_exit_statuses(tmp_path):
    said = ppsmoke("--help", home=tmp_path)
    assert said.status == 0
    for word in ("--prompt", "--raw", "--wire-dtype", "--json", "package", "cache", "smollm2:135m", "exit status"):
        assert word in said.stdout


def test_the_version_is_the_packages(tmp_path):
    assert ppsmoke("--version", home=tmp_path).stdout.startswith(f"ppsmoke {__version__}")


def test_a_package_that_cannot_be_written_is_one_line_and_a_hint(tmp_path):
    said = ppsmoke("package", "-o", str(tmp_path / "no" / "such" / "folder.pyz"), home=tmp_path)
    assert said.status == 1 and len(said.error_lines) == 2 and "hint:" in said.stderr


@pytest.mark.slow
def test_the_cache_is_shown_and_cleared_and_nothing_else_is_touched(tmp_path):
    folder = tmp_path / "cache" / "ppsmoke" / "models"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"x" * 2_000_000)
    (tmp_path / "cache" / "other").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = ppsmoke("cache", home=tmp_path, environment=environment)
    assert shown.status == 0 and "2.0 MB" in shown.stdout and "model.gguf" in shown.stdout
    cleared = ppsmoke("cache", "clear", home=tmp_path, environment=environment)
    assert cleared.status == 0 and not (folder / "model.gguf").exists() and (tmp_path / "cache" / "other").exists()
    assert "0.0 MB" in ppsmoke("cache", home=tmp_path, environment=environment).stdout


@pytest.mark.parametrize("missing", ["tinygrad", pytest.param("numpy", marks=pytest.mark.slow)])
def test_a_python_that_cannot_compute_is_told_what_to_install(missing, tmp_path):
    blocker = tmp_path / "site"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(
        "import importlib.util\nfound = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name == {missing!r} else found(name, *a)\n"
    )
    path = os.pathsep.join([str(blocker), own_command()[1].get("PYTHONPATH", "")])
    said = ppsmoke("--model", str(TINY_F32), home=tmp_path, environment={"PYTHONPATH": path})
    assert said.status == 1 and missing in said.error_lines[0] and "pip install" in said.error_lines[1]


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="only Python 3.10 cannot compute a stage")
def test_python_3_10_is_told_that_a_stage_needs_3_11(tmp_path):
    said = ppsmoke("--model", str(TINY_F32), home=tmp_path)
    assert said.status == 1 and "3.11" in said.error_lines[0]
