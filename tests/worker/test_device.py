"""The choice of a device, and what a person is told to install. Needs neither tinygrad nor a GPU."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from ppsmoke.errors import EnvironmentLacks
from ppsmoke.worker import device


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Python 3.12 with tinygrad and a clang on the PATH, an empty cache and no GPU."""
    clang = tmp_path / "bin" / "clang"
    clang.parent.mkdir()
    clang.write_text("")
    clang.chmod(0o755)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    monkeypatch.setattr(device, "_check_modules", lambda: None)
    monkeypatch.setattr(device, "_has_gpu", lambda: False)
    monkeypatch.setattr(device, "LIBCUDA_FOLDERS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {"PATH": str(clang.parent)}


def driver(machine: dict[str, str], folder: Path) -> Path:
    """libcuda where only LD_LIBRARY_PATH leads, as containers mount it."""
    folder.mkdir()
    (folder / "libcuda.so.1").write_text("")
    machine["LD_LIBRARY_PATH"] = f"/nowhere:{folder}"
    return folder / "libcuda.so.1"


def test_without_a_gpu_the_cpu_computes(machine, tmp_path):
    assert device.prepare("", machine) == "CPU"
    assert machine["CPU"] == "1" and "CUDA" not in machine
    database = Path(machine["CACHEDB"])
    assert database.is_relative_to(tmp_path / "cache") and stat.S_IMODE(database.parent.stat().st_mode) == 0o700


def test_a_gpu_is_chosen_where_there_is_one_and_needs_no_clang(machine, tmp_path, monkeypatch):
    libcuda = driver(machine, tmp_path / "driver")
    monkeypatch.setattr(device, "_has_gpu", lambda: True)
    machine["PATH"] = "/nowhere"
    assert device.prepare("", machine) == "CUDA"
    assert (machine["CUDA"], machine["CUDA_PTX"], machine["CUDA_PATH"]) == ("1", "1", str(libcuda))
    assert "CPU" not in machine


def test_a_driver_library_without_a_gpu_is_no_gpu(machine, tmp_path):
    driver(machine, tmp_path / "driver")
    assert device.prepare("", machine) == "CPU"


def test_a_gpu_is_taken_by_its_number(machine, tmp_path):
    driver(machine, tmp_path / "driver")
    assert device.prepare("cuda:1", machine) == "CUDA:1"


@pytest.mark.parametrize(
    ("requested", "named", "hint"),
    [("CUDA", "no NVIDIA driver", "CPU"), ("TPU", "unknown device 'TPU'", "CPU, CUDA"), ("cuda:x", "cuda:x", "CUDA")],
)
def test_a_device_that_is_not_there_is_refused(machine, requested, named, hint):
    with pytest.raises(EnvironmentLacks, match=named) as caught:
        device.prepare(requested, machine)
    assert hint in caught.value.hint


def test_without_clang_the_hint_installs_it(machine):
    machine["PATH"] = "/nowhere"
    with pytest.raises(EnvironmentLacks, match="clang") as caught:
        device.prepare("CPU", machine)
    assert "install" in caught.value.hint


def test_an_older_python_is_told_to_be_newer(machine, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(EnvironmentLacks, match="3.11 or newer"):
        device.prepare("", machine)


def test_without_tinygrad_the_hint_is_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None if name == "tinygrad" else object())
    with pytest.raises(EnvironmentLacks, match="tinygrad cannot be imported") as caught:
        device._check_modules()
    assert caught.value.hint == f"{sys.executable} -m pip install tinygrad==0.12.0 numpy"


def test_a_cache_that_cannot_be_written_is_done_without(machine, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert device.prepare("CPU", machine) == "CPU"
    assert machine["CACHELEVEL"] == "0" and "CACHEDB" not in machine


def test_a_kernel_cache_that_the_user_chose_is_left_alone(machine):
    machine["CACHEDB"] = "/somewhere/cache.db"
    device.prepare("CPU", machine)
    assert machine["CACHEDB"] == "/somewhere/cache.db" and "CACHELEVEL" not in machine


def test_two_kinds_of_machine_that_share_a_home_do_not_share_kernels(machine, tmp_path):
    first = device._machine_id(machine)
    (tmp_path / "bin" / "clang").write_text("another clang")
    assert device._machine_id(machine) != first
