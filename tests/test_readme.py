"""The README's examples are run as they stand there, and what it lists exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.commands import ppsmoke

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="a computing stage needs Python 3.11")
@pytest.mark.parametrize(("example", "runner"), [(0, "pytest"), (1, "unittest")])
def test_an_example_for_other_peoples_suites_passes(example, runner, tmp_path):
    (tmp_path / "test_example.py").write_text(EXAMPLES[example])
    command = [sys.executable, "-m", runner, *(["-q"] if runner == "pytest" else []), "test_example"]
    command[-1] += ".py" if runner == "pytest" else ""
    above = str(Path(__file__).parent.parent)
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": above}, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout if runner == "pytest" else "Ran 1 test" in done.stderr


def test_the_readme_opens_with_the_two_commands_and_nothing_else():
    before, *blocks = README.split("```sh\n")
    assert len(before.splitlines()) <= 10
    assert "pip install" in blocks[0] and "-m ppsmoke" in blocks[0] and "clang" in blocks[0]
    assert "-m pytest" in blocks[1]


def test_every_option_of_the_help_is_in_the_readme(tmp_path):
    shown = ppsmoke("--help", home=tmp_path).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", shown)) - {"--help", "--version", "--verbose", "--quiet"}
    assert options and [option for option in sorted(options) if option not in README] == []
