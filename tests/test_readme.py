"""README and docs go in; whether their code runs, their links lead somewhere and their tables are true comes out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from benchmarks.faults import Caught, catalogue, error_table, fault_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
UPDATES = (ROOT / "docs" / "weight_updates.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = ("rlenv", "agents", "tasks", "benchmarks")


def code_blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def test_readme_prints_the_three_shapes_of_the_library() -> None:
    plain, bound, training = code_blocks(README, "python")
    assert 'rlenv.make("math-v0")' in plain
    assert "rlenv.Engine(" in bound and "rlenv.make_vec(" in bound
    assert "AsyncAgent(" in training and ".train(steps=200)" in training


def test_plain_environment_runs_as_printed() -> None:
    names: dict[str, Any] = {}
    exec(code_blocks(README, "python")[0], names)
    assert isinstance(names["env"], gymnasium.Env)
    assert isinstance(names["obs"], str)
    assert names["reward"] in (0.0, 1.0)
    assert names["terminated"] is True
    assert names["truncated"] is False


def test_tree_names_every_file_and_no_other() -> None:
    (tree,) = (block for block in code_blocks(README, "") if block.startswith("rlenv/"))
    assert sorted(named_in(tree)) == sorted(files_worth_naming())


def test_every_file_of_the_tree_has_one_phrase() -> None:
    (tree,) = (block for block in code_blocks(README, "") if block.startswith("rlenv/"))
    for line in tree.splitlines():
        assert re.fullmatch(r" *\S+ {2,}\S.{5,95}", line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).is_file(), target


def test_picture_of_the_demo_is_small() -> None:
    assert (ROOT / "docs" / "demo.png").stat().st_size < 200 * 1024


def test_fault_table_of_the_docs_has_every_fault_and_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "faults_cpu.json").read_text())
    caught = [Caught(**row) for row in measured["caught"]]
    assert [row.fault for row in caught] == [fault.name for fault in catalogue()]
    assert fault_table(caught) in UPDATES
    assert error_table(measured["smallest_error"]) in UPDATES
    assert f"{len(caught)} ways to break an update" in README


def named_in(tree: str) -> Iterator[str]:
    """The paths that a tree names, two spaces a level; a folder counts only where nothing below it is named."""
    parents: list[str] = []
    lines = [(len(line) - len(line.lstrip()), line.split()[0]) for line in tree.splitlines()]
    for (indent, name), (following, _) in zip(lines, [*lines[1:], (0, "")], strict=True):
        parents = [*parents[: indent // 2], name]
        if following <= indent:
            yield "".join(parents)


def files_worth_naming() -> Iterator[str]:
    """Every module that is not empty, every file of task data, and the folders of other data."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            relative = path.relative_to(ROOT)
            if any(parent.is_symlink() for parent in (path, *path.parents)) or path.is_dir():
                continue
            if (path.suffix == ".py" and path.stat().st_size) or path.suffix == ".jsonl":
                yield relative.as_posix()
    yield from ("benchmarks/results/", "rlenv/models/tiny/")
