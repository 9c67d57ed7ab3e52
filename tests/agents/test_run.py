"""A whole run on fakes: what the run folder says when it ends well, badly, or by hand."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import re
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

import gymnasium
import pytest
from fakes import FakeLearner

import rlenv
from rlenv.agents.config import TrainConfig
from rlenv.agents.display import LineDisplay
from rlenv.agents.evaluate import distinct_seeds, evaluate
from rlenv.agents.report import RunResult
from rlenv.agents.run import Run
from rlenv.agents.run_folder import read_metrics
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import EngineDeadError, GroupError
from rlenv.replay import replay
from rlenv.spaces import Text
from rlenv.trajectories import read_trajectories
from rlenv.types import Failure, Group, Sample

Start = Callable[..., ScriptedEngine]


def run_of(
    engine: ScriptedEngine, learner: FakeLearner, folder: Path, told: IO[str] | None = None, **settings: Any
) -> Run:
    @contextlib.asynccontextmanager
    async def parts(config: TrainConfig) -> AsyncIterator[tuple[ScriptedEngine, FakeLearner]]:
        yield engine, learner

    small = {"steps": 3, "groups_per_step": 2, "group_size": 4, "eval_problems": 5}
    config = TrainConfig(**{"task": "math-v0", "run_dir": str(folder), **small, **settings})
    return Run(config, LineDisplay(config.steps, told or io.StringIO()), parts)


def arithmetician(engine: list[ScriptedEngine]) -> Callable[[tuple[int, ...], Sample], str]:
    """Answers sums: always right when greedy, else right at every second call."""
    calls = iter(range(10**9))

    def policy(prompt: tuple[int, ...], sample: Sample) -> str:
        a, b = re.search(r"(\d+)\+(\d+)", engine[0].tokenizer.decode(prompt)).groups()
        wrong = sample.temperature > 0 and next(calls) % 2
        return f"\\boxed{{{int(a) + int(b) + wrong}}}"

    return policy


@pytest.fixture
def solver(scripted: Start) -> ScriptedEngine:
    box: list[ScriptedEngine] = []
    box.append(scripted(arithmetician(box)))
    return box[0]


def summary_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_everything_in_its_folder(solver: ScriptedEngine, tmp_path: Path) -> None:
    result: RunResult = asyncio.run(run_of(solver, FakeLearner(), tmp_path / "run")())
    summary = summary_in(tmp_path / "run")
    assert summary == result.summary and summary["status"] == "done"
    assert summary["eval_before_greedy"] == summary["eval_after_greedy"] == 1.0
    assert 0.0 < summary["eval_before"] < 1.0 and summary["eval_problems"] == 5
    wanted = {
        "eval_before", "eval_after", "eval_before_length", "eval_after_length", "updates", "weight_updates",
        "weight_updates_mid_generation", "staleness_max", "staleness_bound", "mismatch_max_abs", "canary_failures",
        "failures", "dropped_stale", "tokens_per_s", "learner_idle", "engine_idle", "wall_s", "seed",
    }  # fmt: skip
    assert wanted <= summary.keys() and summary["updates"] == 3
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"] == "math-v0"
    assert (tmp_path / "run" / "curves.png").exists() and result.model.is_dir()
    assert not (tmp_path / "run" / "error.txt").exists()


def test_training_samples_as_it_was_told_and_an_evaluation_from_the_model_itself(
    scripted: Start, tmp_path: Path
) -> None:
    seen: set[tuple[float, float, int]] = set()

    def policy(prompt: tuple[int, ...], sample: Sample) -> str:
        seen.add((sample.temperature, sample.top_p, sample.top_k))
        return "\\boxed{1}"

    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    asyncio.run(run_of(scripted(policy), FakeLearner(), tmp_path / "run", **settings)())
    assert seen == {(0.7, 0.9, 5), (1.0, 1.0, 0), (0.0, 1.0, 0)}


def test_a_failed_run_names_its_error_and_keeps_the_traceback(solver: ScriptedEngine, tmp_path: Path) -> None:
    class Dies(FakeLearner):
        async def step(self, batch: Any) -> Any:
            if len(self.batches) == 1:
                raise EngineDeadError("engine 'x' died")
            return await super().step(batch)

    with pytest.raises(EngineDeadError):
        asyncio.run(run_of(solver, Dies(), tmp_path / "run")())
    summary = summary_in(tmp_path / "run")
    assert summary["status"] == "failed" and summary["error"] == "EngineDeadError: engine 'x' died"
    assert summary["updates"] == 1 and len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1
    assert "in step" in (tmp_path / "run" / "error.txt").read_text()


@pytest.mark.parametrize("after_s", [0.001, 0.1, 0.4])
def test_an_interrupted_run_can_be_read(scripted: Start, tmp_path: Path, after_s: float) -> None:
    engine = scripted(lambda prompt, sample: "\\boxed{1}", delay=0.001)

    async def body() -> None:
        run = asyncio.create_task(run_of(engine, FakeLearner(0.02), tmp_path / "run", steps=1000)())
        await asyncio.sleep(after_s)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(body())
    summary = summary_in(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == summary.get("updates", 0)
    assert (tmp_path / "run" / "curves.png").exists()


def test_held_out_problems_are_distinct_and_never_trained_on() -> None:
    def texts(seeds: list[int], split: str) -> set[str]:
        env = rlenv.make("math-v0", split=split)
        return {env.reset(seed=seed)[0] for seed in seeds}

    seeds = distinct_seeds("math-v0", 200)
    held_out = texts(seeds, "eval")
    assert len(held_out) == 200
    assert not held_out & texts(list(range(5000)), "train")
    assert distinct_seeds("math-v0", 50) == seeds[:50]


class Coin(gymnasium.Env[str, str]):
    """A third party's environment, which knows nothing of rlenv: two problems, no splits."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Text(), Text()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.side = str(self.np_random.choice(["heads", "tails"]))
        return f"Say {self.side}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "edge":
            raise LookupError("lost the coin")
        return "", float(action == self.side), True, False, {}


@pytest.fixture
def coin() -> Any:
    gymnasium.register("thirdparty/Coin-v3", Coin)
    yield "thirdparty/Coin-v3"
    del gymnasium.registry["thirdparty/Coin-v3"]


def test_somebody_elses_environment_trains_unmodified(scripted: Start, tmp_path: Path, coin: str) -> None:
    says = itertools.cycle(["heads", "tails", "tails", "heads", "edge"])
    engine = scripted(lambda prompt, sample: "heads" if sample.temperature == 0 else next(says))
    result = asyncio.run(run_of(engine, FakeLearner(), tmp_path / "run", task=coin)())
    assert result.summary["updates"] == 3 and result.summary["eval_problems"] in (1, 2)
    assert result.summary["failures"]["LookupError"] > 0


def test_an_evaluation_counts_failures_apart_from_its_means() -> None:
    async def rollout(id: int, seed: int) -> Group:
        return Group(id, "t", seed, (), (Failure("t", seed, "timeout", "slow"),))

    with pytest.raises(GroupError, match="timeout"):
        asyncio.run(evaluate(rollout, [1, 2]))


def killing_solver(scripted: Start, greedy_calls: set[int]) -> tuple[ScriptedEngine, list[str]]:
    """An engine that dies in these of its greedy requests, which only evaluations make; the labels of its restarts."""
    box: list[ScriptedEngine] = []
    solve, greedy, labels = arithmetician(box), itertools.count(), []

    def policy(prompt: tuple[int, ...], sample: Sample) -> str:
        if sample.temperature == 0 and next(greedy) in greedy_calls:
            box[0].kill()
        return solve(prompt, sample)

    box.append(scripted(policy, delay=0.001))
    restart = box[0].restart

    async def recorded(*arguments: Any) -> Any:
        report = await restart(*arguments)
        labels.append(report.label)
        return report

    box[0].restart = recorded
    return box[0], labels


@pytest.mark.parametrize(("answer", "silent"), [("none", True), ("", False)], ids=["all wrong", "half of them right"])
def test_a_person_is_told_when_no_group_has_a_signal(
    scripted: Start, tmp_path: Path, solver: ScriptedEngine, answer: str, silent: bool
) -> None:
    engine = scripted(lambda prompt_ids, sample: answer) if answer else solver
    told = io.StringIO()
    asyncio.run(run_of(engine, FakeLearner(), tmp_path / "run", told, steps=5, eval_problems=0)())
    assert told.getvalue().count("no signal in 3 steps: the rewards of every group are equal, at last 0") == silent


@pytest.mark.parametrize(("greedy_call", "label"), [(2, "0#2"), (7, "3#2")], ids=["before", "after"])
def test_a_death_during_an_evaluation_is_outlived_at_the_version_evaluated(
    scripted: Start, tmp_path: Path, greedy_call: int, label: str
) -> None:
    engine, labels = killing_solver(scripted, {greedy_call})
    told = io.StringIO()
    summary = asyncio.run(run_of(engine, FakeLearner(), tmp_path / "run", told)()).summary
    assert re.search(r"engine 'scripted' died; \d+ requests were pending: rlenv/math-v0 seed \d+", told.getvalue())
    assert f"serves again, with weights {label[0]}, proven" in told.getvalue()
    assert (summary["status"], summary["updates"], engine.weight_version) == ("done", 3, 3)
    assert (summary["engine_restarts"], labels) == (1, [label])
    assert summary["eval_before_greedy"] == summary["eval_after_greedy"] == 1.0 and summary["eval_problems"] == 5
    assert summary_in(tmp_path / "run") == summary


def test_an_engine_that_dies_again_and_again_in_an_evaluation_ends_the_run(scripted: Start, tmp_path: Path) -> None:
    engine, labels = killing_solver(scripted, set(range(100)))
    with pytest.raises(EngineDeadError, match=r"engine 'scripted' died; \d+ requests were pending"):
        asyncio.run(run_of(engine, FakeLearner(), tmp_path / "run")())
    assert labels == ["0#2", "0#3", "0#4"] and engine.in_flight == 0
    assert summary_in(tmp_path / "run")["status"] == "failed"


def test_what_ends_an_evaluation_ends_its_other_rollouts() -> None:
    ended: list[int] = []

    async def rollout(id: int, seed: int) -> Group:
        try:
            await asyncio.sleep(0 if id == 1 else 60)
        finally:
            ended.append(id)
        raise EngineDeadError("engine 'x' died")

    with pytest.raises(EngineDeadError):
        asyncio.run(asyncio.wait_for(evaluate(rollout, [1, 2, 3]), 5))
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("steps", [3, 1000])
def test_a_run_keeps_its_rollouts_if_asked_and_they_can_be_read_however_it_ends(
    solver: ScriptedEngine, tmp_path: Path, steps: int
) -> None:
    run = run_of(solver, FakeLearner(0.01), tmp_path / "run", steps=steps, eval_problems=0, save_trajectories=True)

    async def body() -> None:
        running = asyncio.create_task(run())
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not running.done() and not (metrics.exists() and len(read_metrics(metrics)) >= 3):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if steps == 1000:
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(body())
    summary = summary_in(tmp_path / "run")
    groups = [*read_trajectories(tmp_path / "run")]
    assert summary["status"] == ("done" if steps == 3 else "interrupted")
    assert len(groups) >= 6 and {len(group.trajectories) for group in groups} == {4}
    assert len({group.id for group in groups}) == len(groups)
    assert replay(groups[0].trajectories[0]) == []


def test_a_run_is_evaluated_on_the_way_if_asked(solver: ScriptedEngine, tmp_path: Path) -> None:
    run = run_of(solver, FakeLearner(), tmp_path / "run", steps=5, eval_every=2)
    evaluations = asyncio.run(run()).summary["evaluations"]
    assert [row["step"] for row in evaluations] == [2, 4]
    assert all(0 < row["accuracy"] < 1 and row["length"] > 1 for row in evaluations)


def test_a_run_keeps_no_rollouts_unless_asked(solver: ScriptedEngine, tmp_path: Path) -> None:
    asyncio.run(run_of(solver, FakeLearner(), tmp_path / "run", steps=1)())
    assert not (tmp_path / "run" / "trajectories").exists()
