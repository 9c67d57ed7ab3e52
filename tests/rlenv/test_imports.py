"""The packages' sources go in; the direction of their imports, their cost and what is shipped come out."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlenv

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
# A room imports rooms to its left, and its own; a module that is not named here stands in the row of `registry`.
ROWS = (
    {"types", "errors"},
    {"spaces", "env", "infos", "isolated", "limit", "render", "grading", "engine", "models"},
    {"bound", "registry", "vector", "rollout", "__init__"},
    {"tasks", "agents"},
)
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
MODULES = sorted(
    path.relative_to(ROOT) for folder in ("rlenv", "agents", "tasks") for path in (ROOT / folder).rglob("*.py")
)


def room_of(module: str) -> str:
    """`rlenv.engine.base` → `engine`; `rlenv` itself → `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """The modules of ours that a file imports, `if TYPE_CHECKING` and functions included, with what it takes."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "rlenv")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            if node.module and node.module.split(".")[0] == "rlenv":
                yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_room_imports_to_the_right(path: Path) -> None:
    room = path.stem if path.parts[0] == "rlenv" and len(path.parts) == 2 else path.parts[1]
    room = path.parts[0] if path.parts[0] in ("agents", "tasks") else room
    for module, name in imports(path):
        target = room_of(module)
        if target == "__init__" and name:  # `from rlenv import render`
            target = name if name in ROW else "__init__"
        if {room, target} == {"tasks", "agents"}:
            pytest.fail(f"{path} imports {module}: agents and tasks do not know each other")
        assert ROW.get(target, 2) <= ROW.get(room, 2), f"{path} imports {module}"


def test_every_package_on_disk_is_shipped_and_no_other() -> None:
    folders = {path.parent for path in MODULES if path.name == "__init__.py"}
    shipped = {folder.parts for folder in folders if folder.parts[0] == "rlenv"}
    shipped |= {("rlenv", *folder.parts) for folder in folders if folder.parts[0] != "rlenv"}
    assert {".".join(parts) for parts in shipped} == set(PACKAGES)
    with_modules = {path.parent for path in MODULES}
    assert with_modules == folders, "a folder of modules lacks its __init__.py"


def test_every_data_file_of_a_package_is_shipped() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    for folder in ("rlenv", "agents", "tasks"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts:
                assert any(path.match(pattern) for pattern in patterns), path


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, object]:
    """What `import rlenv` loads and takes, in a new process; the best of three."""
    code = (
        "import time, sys, json; began = time.perf_counter(); import rlenv; took = time.perf_counter() - began; "
        "print(json.dumps({'took': took, 'loaded': [m for m in sys.modules]}))"
    )
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, timeout=60)) for _ in range(3)]
    return min(runs, key=lambda run: run["took"])


def test_importing_rlenv_loads_nothing_heavy(fresh_import: dict[str, list[str]]) -> None:
    heavy = {
        "torch",
        "vllm",
        "transformers",
        "datasets",
        "accelerate",
        "matplotlib",
        "ray",
        "rlenv.tasks",
        "rlenv.agents",
    }
    assert not heavy & set(fresh_import["loaded"])


def test_importing_rlenv_takes_less_than_a_second(fresh_import: dict[str, float]) -> None:
    assert fresh_import["took"] < 1.0


def test_every_public_name_is_there_and_dir_names_it() -> None:
    assert set(dir(rlenv)) == set(rlenv.__all__)
    for name in set(rlenv.__all__) - {"Engine"}:
        assert getattr(rlenv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Enviroment'"):
        _ = rlenv.Enviroment
