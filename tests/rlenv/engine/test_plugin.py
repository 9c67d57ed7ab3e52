"""A vLLM process whose parent is gone ends, and takes with it the one relative that would not end by itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rlenv.engine.transfer import plugin


@dataclass
class Sibling:
    title: str
    gone: bool = False
    killed: list[str] = field(default_factory=list)

    def name(self) -> str:
        if self.gone:
            raise psutil.NoSuchProcess(1)
        return self.title

    def kill(self) -> None:
        self.killed.append(self.title)


def test_orphan_ends_the_coordinator_and_nobody_else_and_clears_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    siblings = [Sibling("VLLM::DPCoordinator", gone=True), Sibling("python"), Sibling("VLLM::DPCoordinator")]
    monkeypatch.setattr(plugin, "_children_of", lambda pid: siblings)
    monkeypatch.setattr(os, "_exit", leave)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "socket").touch()
    with pytest.raises(SystemExit):
        plugin._watch(-1, str(tmp_path / "scratch"))  # nobody's parent
    assert not (tmp_path / "scratch").exists()
    assert [sibling.killed for sibling in siblings] == [[], [], ["VLLM::DPCoordinator"]]
