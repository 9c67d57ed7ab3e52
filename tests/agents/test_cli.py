"""The command line: one line for what cannot work, and no process left however a run ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


@pytest.mark.slow
def test_a_launcher_of_several_processes_is_told_what_to_type() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "rlenv.agents.train", "math-v0"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "--num_processes 1" in run.stderr and run.stderr.count("\n") == 1


class Command:
    """`rlenv train TASK …` in a session of its own, typed in the parent of its run folder."""

    def __init__(self, folder: Path, *arguments: str, task: str = "math-v0") -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlenv.agents.cli", "train", task, "--run-dir", str(folder), *arguments],
            cwd=folder.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.family: set[psutil.Process] = set()
        self.shared: set[Path] = set()
        self.scratch: set[Path] = set()

    def summary(self) -> dict[str, Any]:
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for_updates(self, count: int) -> None:
        self.wait_until(lambda: self.summary().get("updates", 0) >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.summary()
            time.sleep(0.05)

    def remember_family(self) -> None:
        """Note who belongs to this run, the shared memory they hold and their folder, while the parent can tell."""
        new = set(psutil.Process(self.process.pid).children(recursive=True)) - self.family
        self.family |= new
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                areas = [Path(area.path) for area in process.memory_maps()]
                self.shared |= {area for area in areas if area.parent == Path("/dev/shm")}
                if folder := process.environ().get("VLLM_RPC_BASE_PATH"):
                    self.scratch.add(Path(folder))

    def press_ctrl_c(self) -> None:
        """As a terminal does: to every process of the foreground group."""
        self.remember_family()
        os.killpg(self.process.pid, signal.SIGINT)

    def survivors(self) -> list[psutil.Process]:
        return [process for process in self.family if _is_alive(process)]

    def remains(self) -> list[object]:
        return [*self.survivors(), *filter(Path.exists, self.shared)]

    def assert_gone(self) -> None:
        assert self.family, "a run has processes of its own"
        deadline = time.monotonic() + END_S
        while self.remains() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.remains() == []


Start = Callable[..., Command]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


THIRD_PARTY = '''
import string

import gymnasium


class Sums(gymnasium.Env):
    """Knows Gymnasium and nothing of rlenv."""

    observation_space = gymnasium.spaces.Text(max_length=99, charset=string.printable)
    action_space = gymnasium.spaces.Text(max_length=9999, min_length=0, charset=map(chr, range(0x110000)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.operands = self.np_random.integers(10, 100, size=2)
        return "What is {}+{}? Put the answer in \\\\boxed{{}}.".format(*self.operands), {}

    def step(self, action):
        return "over", float(f"boxed{{{sum(self.operands)}}}" in action), True, False, {}


gymnasium.register("ThirdPartySums-v0", Sums)
'''
# The second update stands still for a while between its weights and its end, and says so by a file.
SLOW_SWAP = """
import pathlib, time

from rlenv.engine.transfer.update import _Attempt

whole = _Attempt.update_weights


def update_weights(attempt, info):
    whole(attempt, info)
    if attempt.version == 2:
        pathlib.Path("swapping").touch()
        time.sleep(5)


_Attempt.update_weights = update_weights
"""
LONG = ("--steps", "10000", "--eval-problems", "0", "--groups-per-step", "8")  # would take hours


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`start(*arguments, task=…)` types a command; it is killed at the end of the test if it is still there."""
    commands: list[Command] = []

    def start(*arguments: str, **task: str) -> Command:
        commands.append(Command(tmp_path / "run", *arguments, **task))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        for process in command.survivors():
            process.kill()
        command.process.communicate()


@pytest.mark.engine
@pytest.mark.slow
def test_somebody_elses_environment_trains_from_the_command_line_and_leaves_a_model_and_no_process(
    start: Start, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "third_party.py").write_text(THIRD_PARTY)
    options = ("--steps", "3", "--eval-problems", "32", "--groups-per-step", "8")
    command = start(*options, task="third_party:ThirdPartySums-v0")
    command.wait_for_updates(1)
    command.remember_family()
    output, errors = command.process.communicate(timeout=START_S)
    assert command.process.returncode == 0, errors
    assert errors == "" and "step 3/3" in output
    summary = command.summary()
    assert (summary["status"], summary["updates"], summary["weight_updates"]) == ("done", 3, 3)
    assert summary["mismatch_max_abs"] <= 1e-4 and summary["failures"] == {}
    assert 0 < summary["eval_before"] < 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    command.assert_gone()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("swapping", [False, True], ids=["starting", "swapping weights"])
def test_ctrl_c_ends_a_run_with_status_130_and_a_readable_folder(start: Start, tmp_path: Path, swapping: bool) -> None:
    (tmp_path / "slow_swap.py").write_text(SLOW_SWAP)
    command = start(*LONG, task="slow_swap:rlenv/math-v0")
    if swapping:
        command.wait_until((tmp_path / "swapping").exists)
    else:
        time.sleep(8)
    command.press_ctrl_c()
    _, errors = command.process.communicate(timeout=END_S)
    assert command.process.returncode == 130 and "Traceback" not in errors
    command.assert_gone()
    assert command.summary()["status"] == "interrupted"
    assert command.summary().get("updates", 0) == swapping  # the update under way is not one
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(read_metrics(metrics)) == swapping and (tmp_path / "run" / "curves.png").is_file()


@pytest.mark.engine
@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(start: Start) -> None:
    command = start(*LONG)
    command.wait_for_updates(1)
    command.press_ctrl_c()
    time.sleep(0.2)
    began = time.monotonic()
    command.press_ctrl_c()
    command.process.communicate(timeout=END_S)
    assert command.process.returncode == 130 and time.monotonic() - began < 3
    command.assert_gone()
    assert command.summary()["updates"] >= 1


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_no_shared_memory(start: Start) -> None:
    command = start(*LONG)
    command.wait_for_updates(1)
    command.remember_family()
    assert command.shared and command.scratch
    command.process.kill()
    command.process.communicate(timeout=END_S)
    command.assert_gone()
    assert not any(map(Path.exists, command.scratch))
    assert command.summary()["status"] == "running"
