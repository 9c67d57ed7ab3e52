"""The page on new tasks goes in; whether its code is short, is a task, and trains, comes out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rlenv.replay import replay
from rlenv.trajectories import read_trajectories

PAGE = (Path(__file__).parents[1] / "docs" / "new_task.md").read_text()
TASK, CHECKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the page's file defines when it is imported."""
    names: dict[str, Any] = {"__name__": "brief_sums"}
    exec(TASK, names)
    yield names
    gymnasium.registry.pop("mine/brief-sums-v0")


def test_a_task_and_its_training_take_under_40_lines() -> None:
    assert len(TASK.splitlines()) < 40


def test_the_checks_of_the_page_hold(names: dict[str, Any]) -> None:
    exec(CHECKS, names)


@pytest.mark.engine
@pytest.mark.slow
def test_the_very_code_trains(tmp_path: Path) -> None:
    (tmp_path / "brief_sums.py").write_text(TASK)
    run = subprocess.run(
        [sys.executable, "brief_sums.py", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(r"mean reward \d\.\d\d -> \d\.\d\d: runs/brief/model$", run.stdout.strip())
    summary = json.loads((tmp_path / "runs" / "brief" / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("done", 2)
    groups = [*read_trajectories(tmp_path / "runs" / "brief")]
    assert len(groups) >= 64 and {row.info["rewards"]["right"] for row in groups[0].trajectories} <= {0.0, 1.0}
    again = subprocess.run(
        [sys.executable, "-P", "-m", "rlenv.agents.cli", "replay", "runs/brief"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (again.returncode, "replay agrees" in again.stdout) == (0, True), again.stderr


def test_a_recorded_episode_of_the_page_is_replayed(names: dict[str, Any]) -> None:
    import rlenv
    from rlenv.types import Failure

    env = rlenv.make("mine/brief-sums-v0")
    prompt, _ = env.reset(seed=4)
    said = ({"role": "user", "content": prompt}, {"role": "assistant", "content": "\\boxed{1}"})
    failure = Failure("mine/brief-sums-v0", 4, "abstained", "", said, {"options": {}, "spec": env.spec})
    assert replay(failure, env) == ["it ended by abstained, and ends by a reward"]
