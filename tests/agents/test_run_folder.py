"""The run folder: complete at any moment, never overwritten, readable by ordinary tools."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rlenv.agents.run_folder import RunFolder, read_metrics, to_toml, write_atomically
from rlenv.errors import ConfigError


def test_metrics_can_be_read_line_by_line_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", {"task": "t"})
    folder.add_metrics({"step": 1, "reward": 0.5})
    folder.add_metrics({"step": 2, "reward": float("nan")})
    assert read_metrics(folder.path / "metrics.jsonl") == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}]
    folder.close()


def test_a_half_written_last_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_metrics(path) == [{"step": 1}]


def test_config_survives_the_way_through_toml() -> None:
    config = {"task": 'a "b"\\\n\x7fπ', "lr": 1e-5, "steps": 3, "control": False, "model": None}
    assert tomllib.loads(to_toml(config)) == {k: v for k, v in config.items() if v is not None}


def test_an_earlier_run_is_moved_aside_not_overwritten(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        folder = RunFolder(tmp_path / "run", {"task": name})
        folder.write_summary({"name": name})
        folder.close()
    found = {path.name: json.loads((path / "summary.json").read_text())["name"] for path in tmp_path.iterdir()}
    assert found == {"run": "third", "run.1": "first", "run.2": "second"}


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="--run-dir"):
        RunFolder(tmp_path, {"task": "t"})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["summary.json"]
