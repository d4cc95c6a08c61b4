"""The rooms and the arrows between them: who may import whom, and that the core needs the standard library alone."""

import ast
import sys
from pathlib import Path

import pytest

import ppsmoke

ROOT = Path(ppsmoke.__file__).parent
OPEN = {
    "errors",
    "waiting",
    "keys",
    "models",
    "package",
    "standard_streams",
    "",
}  # "": the package itself, for its version
BELOW = {  # room: the rooms that it may import, besides the open ones
    "cluster": set(),
    "report": set(),
    "worker": set(),
    "pipeline": {"cluster", "worker.start"},
    "rent": {"cluster", "report", "worker.cache"},
    "stage_node": {"node_settings", "pipeline", "cluster", "worker.start"},
    "node_settings": {"pipeline", "cluster", "worker.start"},
    "inbox": {"pipeline", "cluster", "report"},
    "smoke": {"inbox", "report", "rent", "pipeline", "cluster", "settings"},
    "settings": set(),
    "testing": {"smoke", "rent", "report", "settings"},
    "vast_run": {"smoke", "rent", "report", "settings"},
    "vast_cli": {"vast_run", "rent", "settings"},
    "cli": {"smoke", "vast_run", "vast_cli", "rent", "report", "settings", "stage_node", "worker.cache"},
    "__main__": {"cli"},
    "errors": set(),
    "waiting": set(),
    "keys": set(),
    "models": set(),
    "package": set(),
    "standard_streams": set(),
    "": set(),
}
MODULES = sorted(ROOT.rglob("*.py"))


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
            if node.module == "ppsmoke" or node.module.startswith("ppsmoke."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below_it(path):
    own = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix("__init__").rstrip(".")
    allowed = OPEN | BELOW[room_of(own)] | {room_of(own)}
    for name in imports_of(path):
        if name == "ppsmoke" or name.startswith("ppsmoke."):
            target = name.removeprefix("ppsmoke").lstrip(".")
            if (
                not (ROOT / target.replace(".", "/")).is_dir()
                and not (ROOT / f"{target.replace('.', '/')}.py").is_file()
            ):
                continue  # a name inside a module, which is checked as that module
            fits = target == "" or any(
                target == one or target.startswith(f"{one}.") or one.startswith(f"{target}.") for one in allowed if one
            )
            assert fits, f"{own} imports {target}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_worker_needs_more_than_the_standard_library(path):
    more = {"tinygrad", "numpy"} if path.relative_to(ROOT).parts[0] == "worker" else set()
    for name in imports_of(path):
        top = name.partition(".")[0]
        assert top in sys.stdlib_module_names or top == "ppsmoke" or top in more, name
