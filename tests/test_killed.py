"""Whatever dies or is signalled, and whenever: the run ends soon, says what it saw, and leaves nothing behind.

The whole table is a command, tests/lab/kill_table.py; here is a row of each kind.
"""

import sys

import pytest

from tests.lab.kill_table import run_case
from tests.lab.paths import TINY_F32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="a computing stage needs Python 3.11"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]


@pytest.mark.parametrize(
    ("action", "event", "status", "named"),
    [
        ("kill worker", "mid-decode", 1, "stage 1: the worker was killed by signal 9"),
        ("kill worker", "loading", 1, "stage 1"),
        ("kill node", "gathering", 1, "stage 1: its process ended (killed by SIGKILL)"),
        ("kill node", "prefill", 1, "stage 1: its process ended (killed by SIGKILL)"),
        ("kill orchestrator", "mid-decode", -9, ""),
        ("kill orchestrator", "loading", -9, ""),
        ("SIGINT", "starting", 130, "interrupted by signal 2"),
        ("SIGTERM", "mid-decode", 143, "ask: interrupted by signal 15"),
        ("SIGHUP", "loading", 129, "load: interrupted by signal 1"),
    ],
)
def test_nothing_is_left_and_the_cause_is_named(action, event, status, named):
    row = run_case(action, event, str(TINY_F32))
    assert row.left == []
    if not row.done:
        pytest.skip(f"there was nothing to kill yet: {row}")
    assert row.status == status and named in row.message
    if status > 0:
        assert row.said["ok"] is False and row.said["error"]["cause"]
