"""Tests that compute begin with this: DEVICE, chosen before tinygrad reads its environment, or they are skipped."""

from __future__ import annotations

import importlib.util
import os

import pytest

from ppsmoke.worker.device import prepare


def device_or_skip() -> str:
    """The device that PPSMOKE_TEST_DEVICE names (default: CPU). Skips the module where a stage cannot compute."""
    if importlib.util.find_spec("tinygrad") is None:
        pytest.skip("needs tinygrad", allow_module_level=True)
    return prepare(os.environ.get("PPSMOKE_TEST_DEVICE", "CPU"), os.environ)


DEVICE = device_or_skip()
