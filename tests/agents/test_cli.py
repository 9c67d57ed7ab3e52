"""The command line: one line for what cannot work, and no process left however a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlenv.agents.cli import DEMO, main
from rlenv.agents.run_folder import read_metrics

START_S = 150  # an engine and a learner on two busy cores
END_S = 20


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["train", "maths-v0"], "math-v0"),
        (["train", "math-v0", "--model", "/no/such/folder"], "--model"),
        (["train", "math-v0", "--device", "cuda"], "--device cpu"),
        (["train", "math-v0", "--group-size", "1"], "--group-size 2"),
        (["train", "math-v0", "--staleness", "-1"], "--staleness 0"),
        (["demo", "--steps", "0"], "--steps 1"),
    ],
)
def test_what_cannot_work_is_answered_in_one_line_with_status_2(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1 and advice in errors


@pytest.mark.parametrize("arguments", [[], ["tarin", "math-v0"], ["train"], ["train", "math-v0", "--stepz", "3"]])
def test_what_is_no_command_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_list_names_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "rlenv/math-v0" in capsys.readouterr().out.splitlines()


def test_the_demo_trains_the_default_model_asynchronously() -> None:
    assert DEMO.model is None and DEMO.mode == "async" and DEMO.staleness > 0 and DEMO.eval_problems == 512


def test_a_launcher_of_several_processes_is_told_what_to_type() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "rlenv.agents.train", "math-v0"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "--num_processes 1" in run.stderr and run.stderr.count("\n") == 1


class Command:
    """`rlenv train math-v0 …` in a session of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlenv.agents.cli", "train", "math-v0", "--run-dir", str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.family: set[psutil.Process] = set()

    def summary(self) -> dict[str, Any]:
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for_updates(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        while self.summary().get("updates", 0) < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.summary()
            time.sleep(0.05)

    def remember_family(self) -> None:
        """Note who belongs to this run while its parent can still tell."""
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def press_ctrl_c(self) -> None:
        """As a terminal does: to every process of the foreground group."""
        self.remember_family()
        os.killpg(self.process.pid, signal.SIGINT)

    def survivors(self) -> list[psutil.Process]:
        return [process for process in self.family if _is_alive(process)]

    def assert_gone(self) -> None:
        assert self.family, "a run has processes of its own"
        deadline = time.monotonic() + END_S
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.survivors() == []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[Command]:
    """A run that would take hours, killed at the end of the test if it is still there."""
    command = Command(tmp_path / "run", "--steps", "10000", "--eval-problems", "0", "--groups-per-step", "8")
    yield command
    command.process.kill()
    for process in command.survivors():
        process.kill()
    command.process.communicate()


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_from_the_command_line_leaves_a_model_and_no_process(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = Command(tmp_path / "run", "--steps", "3", "--eval-problems", "32", "--groups-per-step", "8")
    command.wait_for_updates(1)
    command.remember_family()
    output, errors = command.process.communicate(timeout=START_S)
    assert command.process.returncode == 0, errors
    assert errors == "" and "step 3/3" in output
    assert command.summary()["status"] == "done" and command.summary()["mismatch_max_abs"] <= 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    command.assert_gone()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("updates", [0, 1], ids=["starting", "training"])
def test_ctrl_c_ends_a_run_with_status_130_and_a_readable_folder(long_run: Command, updates: int) -> None:
    if updates:
        long_run.wait_for_updates(updates)
    else:
        time.sleep(8)
    long_run.press_ctrl_c()
    _, errors = long_run.process.communicate(timeout=END_S)
    assert long_run.process.returncode == 130 and "Traceback" not in errors
    long_run.assert_gone()
    assert long_run.summary()["status"] == "interrupted"
    assert len(read_metrics(long_run.folder / "metrics.jsonl")) == long_run.summary().get("updates", 0)


@pytest.mark.engine
@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(long_run: Command) -> None:
    long_run.wait_for_updates(1)
    long_run.press_ctrl_c()
    time.sleep(0.2)
    began = time.monotonic()
    long_run.press_ctrl_c()
    long_run.process.communicate(timeout=END_S)
    assert long_run.process.returncode == 130 and time.monotonic() - began < 3
    long_run.assert_gone()
    assert long_run.summary()["updates"] >= 1


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_run_leaves_no_process(long_run: Command) -> None:
    long_run.wait_for_updates(1)
    long_run.remember_family()
    long_run.process.kill()
    long_run.process.communicate(timeout=END_S)
    long_run.assert_gone()
    assert long_run.summary()["status"] == "running"
