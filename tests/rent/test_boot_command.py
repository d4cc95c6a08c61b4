"""What the create call carries: the start command's size and text, the environment and what it refuses."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ppsmoke.errors import InputError, SmokeError
from ppsmoke.package import build_zipapp
from ppsmoke.rent import boot
from ppsmoke.rent.boot import create_environment, node_secret, start_command
from ppsmoke.rent.minify import minify
from ppsmoke.rent.push import build_payload

SECRET = node_secret(bytes(32), 1)
OF_A_STAGE = {
    "STAGE": "1",
    "NUM_STAGES": "2",
    "SEED_ADDR": "0123456789abcdef",
    "MODEL": "smollm2:135m",
    "PPSMOKE_NODE_LIFETIME_S": "390",
    "PPSMOKE_NODE_LEAF_KEY": "ab" * 32,
}


def spec(**more):
    return SimpleNamespace(stage=1, environment={**OF_A_STAGE, **more})


def test_the_start_command_fits_with_room_to_spare_and_holds_nothing_that_a_shell_or_json_would_touch():
    command = start_command()
    assert command.onstart == "/bin/sh" and command.args[0] == "-c" and len(command.args) == 2
    assert command.size <= 3900 < boot.MAX_COMMAND_BYTES
    text = command.args[1]
    assert text.isascii() and text.isprintable() and text.count("'") == 2
    assert not set(text) & set("$`\\{}!~*?#&|<>%")


def test_a_command_that_would_be_too_long_is_refused_before_anything_is_rented():
    with pytest.raises(SmokeError, match="start command has .* bytes"):
        start_command(tuple(f"package{i}==1.0.{i}" for i in range(20)))


def test_what_it_carries_imports_the_standard_library_alone_and_reads_under_python_3_10():
    for text in minify(*map(boot.program_source, boot.PROGRAMS)):
        tree = ast.parse(text, feature_version=(3, 10))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in names} - {"ppsmoke"} <= sys.stdlib_module_names


def test_a_minified_program_does_what_it_did():
    source = '''
"""A docstring."""
from __future__ import annotations
from collections.abc import Sequence
LIMIT_S = 2 * 3
class Counter:
    """Another."""
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value, self.kept = start, []
    def add(self, times: int, *words: str) -> int:
        for index in range(times):
            self.value += LIMIT_S
            self.kept.append(f"{index}: {words!r} 0 if x else  'y'")
        return self.value
def main(words: Sequence[str]) -> str:
    counter: Counter = Counter(4, step=2)
    try:
        counter.add(2, *words)
        raise ValueError("x")
    except ValueError as error:
        return f"{counter.value} {counter.kept} {error}"
'''
    (short,) = minify(source)
    results = []
    for text in (source, short):
        scope = {"__name__": "it"}
        exec(compile(text, "it", "exec", dont_inherit=True), scope)
        results.append(scope["main"](["a", "b"]))
    assert results[0] == results[1] and len(short) < len(source) * 0.7
    assert "docstring" not in short and "LIMIT_S" not in short


def test_no_python_in_the_image_ends_with_a_line_that_says_so(tmp_path):
    command = start_command()
    said = subprocess.run([command.onstart, *command.args], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert said.returncode == 127 and "python3" in said.stderr and "not found" in said.stderr


def test_the_environment_of_the_create_call():
    made = create_environment(spec(), secret=SECRET, forbidden=["the-users-key"], vast_url="http://127.0.0.1:8080")
    assert made == {
        **OF_A_STAGE,
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "CUDA_PTX": "1",
        "PPSMOKE_NODE_SECRET": SECRET.hex(),
        "PPSMOKE_NODE_LISTEN": "0.0.0.0:7070,0.0.0.0:7071",
        "PPSMOKE_NODE_SILENCE_S": "120",
        "VAST_URL": "http://127.0.0.1:8080",
        "-p 7070:7070": "1",
        "-p 7071:7071/udp": "1",
    }
    assert "VAST_URL" not in create_environment(spec(), secret=SECRET, forbidden=[])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"MODEL": "https://example.org/" + "m" * 236}, "MODEL has 256 bytes"),
        ({"MODEL": "https://example.org/" + "é" * 118}, "MODEL has 256 bytes"),
        ({"MODEL": "m\nVAST_URL=x"}, "control character"),
        ({"MODEL": "https://example.org/?key=the-users-key"}, "secret"),
        ({"PPSMOKE_NODE_X": "the-users-key"}, "secret"),
        ({"PPSMOKE_API_KEY": "x"}, "has no place"),
        ({"HOME": "/home/me"}, "has no place"),
        ({f"PPSMOKE_NODE_{i}": "x" * 255 for i in range(130)}, "larger than 32768"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_an_environment_that_cannot_or_must_not_travel_is_refused_and_its_secret_not_shown(more, words):
    with pytest.raises(SmokeError, match=words) as refused:
        create_environment(spec(**more), secret=SECRET, forbidden=["", "the-users-key"])
    assert "the-users-key" not in str(refused.value) and refused.value.phase == "rent"


def test_a_key_too_short_to_be_one_is_in_every_environment_and_stops_nothing():
    assert "K" in "".join(create_environment(spec(), secret=SECRET, forbidden=["K", "1"]))


def test_a_stage_without_a_lifetime_or_a_secret_is_never_rented():
    with pytest.raises(SmokeError, match="without a secret"):
        create_environment(spec(), secret=b"", forbidden=[])
    bare = SimpleNamespace(stage=0, environment={"STAGE": "0"})
    with pytest.raises(SmokeError, match="or a lifetime"):
        create_environment(bare, secret=SECRET, forbidden=[])


def test_each_stage_and_each_run_has_a_secret_of_its_own():
    secrets = {node_secret(key, stage) for key in (bytes(32), bytes(31) + b"1") for stage in range(3)}
    assert len(secrets) == 6 and {len(secret) for secret in secrets} == {32}


def test_the_real_code_fits_in_a_payload_many_times_over_and_too_much_is_refused():
    assert len(build_payload('{"ca": ""}', build_zipapp(""))) < 1 << 20
    with pytest.raises(InputError, match="a boot takes 4194304"):
        build_payload("{}", bytes(4 << 20))
