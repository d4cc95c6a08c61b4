"""Our code as data: one hash wherever it lies, one zipapp whenever it is built."""

import io
import os
import subprocess
import sys
import zipfile

import pytest

from ppsmoke import __version__, package


def test_two_builds_of_one_commit_are_the_same_bytes_and_another_commit_is_not():
    assert package.build_zipapp("abc") == package.build_zipapp("abc")
    assert package.build_zipapp("abc") != package.build_zipapp("abd")


def test_the_zipapp_holds_every_module_and_nothing_else():
    with zipfile.ZipFile(io.BytesIO(package.build_zipapp(""))) as archive:
        names = set(archive.namelist())
    assert {"__main__.py", "ppsmoke/build.json", "ppsmoke/cli.py", "ppsmoke/worker/__main__.py"} <= names
    assert all(name.endswith((".py", ".json")) for name in names)


@pytest.mark.slow
def test_a_zipapp_says_its_version_and_commit_and_has_the_checkouts_code_hash(tmp_path):
    target = tmp_path / "p.pyz"
    size = package.write_zipapp(target, "0123456789abcdef")
    assert size == target.stat().st_size and os.access(target, os.X_OK)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-I", str(target), "--version"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert said.stdout == f"ppsmoke {__version__} (0123456789ab)\n", said.stderr
    code = f"import sys; sys.path.insert(0, {str(target)!r}); from ppsmoke import package; print(package.code_hash())"
    hashed = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert hashed.stdout.strip() == package.code_hash(), hashed.stderr


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    target = tmp_path / "folder"
    target.mkdir()
    (target / "in the way").touch()
    try:
        package.write_zipapp(target, "")
    except OSError:
        pass
    assert os.listdir(tmp_path) == ["folder"]
