"""Compiled steps between runs: read back, used with other tensors, and never trusted further than they deserve."""

from __future__ import annotations

import os

import pytest

from tests.lab.compute import DEVICE  # isort: skip  (before tinygrad is imported)

import numpy as np
from tinygrad import Tensor

from ppsmoke.worker import kernel_store
from ppsmoke.worker.compiled import Compiled, copy_in, copy_out
from ppsmoke.worker.kernel_store import KernelStore

WHAT = {"step": "sum"}


class Sums:
    """out = the sum of x's first position + 1 values, plus bias; counts how often it is traced."""

    def __init__(self, store: KernelStore, *, bound: bool = False) -> None:
        self.traced = 0
        self.x, self.bias, self.out = (Tensor.zeros(n, device=DEVICE).contiguous().realize() for n in (8, 1, 1))
        self.compiled = Compiled(self._sum, position_limit=7, store=store, what=WHAT, bound=bound)
        self.compiled.warm_up(self.x, self.bias, self.out)

    def _sum(self, x: Tensor, bias: Tensor, out: Tensor, position) -> None:
        self.traced += 1
        out.assign((x[: position + 1].sum() + bias).contiguous()).realize()

    def __call__(self, values: list[float], bias: float, position: int) -> float:
        copy_in(self.x, np.array(values, np.float32))
        copy_in(self.bias, np.array([bias], np.float32))
        self.compiled(self.x, self.bias, self.out, position=position)
        return float(copy_out(self.out)[0])


VALUES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


@pytest.mark.parametrize("bound", [False, True])
def test_a_stored_step_is_not_traced_again_and_works_on_other_tensors(tmp_path, bound):
    store = KernelStore(tmp_path / "steps")
    first, second = Sums(store, bound=bound), Sums(store, bound=bound)
    assert (first.traced, second.traced) == (1, 0)
    for position in (0, 7, 3):
        wanted = sum(VALUES[: position + 1])
        assert first(VALUES, 0.5, position) == wanted + 0.5
        assert second(VALUES, 0.25, position) == wanted + 0.25


def test_a_position_beyond_the_limit_is_refused_where_tinygrad_would_not_look(tmp_path):
    sums = Sums(KernelStore(None))
    for position in (-1, 8):
        with pytest.raises(ValueError, match="outside 0..7"):
            sums(VALUES, 0.0, position)


def test_a_damaged_file_is_compiled_anew(tmp_path, capsys):
    store = KernelStore(tmp_path / "steps")
    Sums(store)
    (path,) = (tmp_path / "steps").glob("*.pickle")
    path.write_bytes(path.read_bytes()[:100])
    again = Sums(store)
    assert again.traced == 1 and again(VALUES, 1.0, 1) == 4.0
    assert "compiled anew" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "folder"])
def test_what_others_could_have_written_is_not_read(tmp_path, place):
    store = KernelStore(tmp_path / "steps")
    Sums(store)
    (path,) = (tmp_path / "steps").glob("*.pickle")
    os.chmod(path if place == "file" else path.parent, 0o777)
    assert store.load(WHAT) is None


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert Sums(KernelStore(tmp_path / "file" / "steps"))(VALUES, 0.0, 2) == 7.0


def test_a_holder_that_hangs_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_store, "LOCK_WAIT_S", 0.1)
    store = KernelStore(tmp_path / "steps")
    with store.alone(WHAT):
        assert Sums(store).traced == 1
