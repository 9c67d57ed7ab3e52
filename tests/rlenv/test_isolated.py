"""Environments that hang, spin, die and raise go in; what their callers see, and how soon, comes out."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from episodes import play_group
from gymnasium.error import ResetNeeded

import rlenv
from rlenv.agents.advantages import score
from rlenv.agents.tally import Tally
from rlenv.engine.scripted import ScriptedEngine

Scripted = Callable[..., ScriptedEngine]


class Unpicklable(Exception):
    """An exception whose arguments do not survive a pipe."""

    def __init__(self, what: str, *, why: str) -> None:
        super().__init__(what)


class Obedient(rlenv.TextEnv):
    """Does what the action says: sleep, spin, die or raise; anything else is right."""

    def start(self, options: Mapping[str, Any]) -> str:
        if "nap" in options:
            time.sleep(options["nap"])
        return str(self.np_random.integers(10**9))

    def turn(self, action: str) -> rlenv.Turn:
        if action == "sleep":
            time.sleep(60)
        while action == "spin":
            pass
        if action == "die":
            os._exit(7)
        if action == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "end":
            return rlenv.Turn(1.0, terminated=True)
        if action == "raise":
            raise ZeroDivisionError("by the task")
        if action == "raise oddly":
            raise Unpicklable("odd", why="keyword only")
        return rlenv.Turn(1.0, "well done", terminated=False)


@pytest.fixture(autouse=True)
def obedient() -> Iterator[None]:
    rlenv.register("tests/obedient-v0", Obedient)
    yield
    del gymnasium.registry["tests/obedient-v0"]


@pytest.fixture
def env() -> Iterator[gymnasium.Env[str, Any]]:
    env = rlenv.make("tests/obedient-v0", step_timeout_s=1.0)
    yield env
    env.close()


def workers() -> list[str]:
    return [child.name for child in multiprocessing.active_children() if child.name == "rlenv env"]


def test_an_isolated_environment_is_the_same_environment(env: gymnasium.Env[str, Any]) -> None:
    plain = rlenv.make("tests/obedient-v0")
    assert env.reset(seed=4) == plain.reset(seed=4)
    assert env.step("ok") == plain.step("ok")
    assert env.spec == plain.spec
    assert env.observation_space == plain.observation_space


@pytest.mark.parametrize("action", [pytest.param("sleep", marks=pytest.mark.slow), "spin"])
def test_a_step_over_its_limit_is_truncated_and_its_process_ended(env: gymnasium.Env[str, Any], action: str) -> None:
    env.reset(seed=0)
    began = time.monotonic()
    assert env.step(action) == ("", 0.0, False, True, {"failure": "timeout"})
    assert time.monotonic() - began < 3
    assert workers() == []


@pytest.mark.slow
def test_after_a_timeout_reset_starts_another_process(env: gymnasium.Env[str, Any]) -> None:
    first, _ = env.reset(seed=3)
    env.step("spin")
    assert env.step("ok")[4] == {"failure": "timeout"}
    assert env.reset(seed=3)[0] == first
    assert env.step("ok")[1] == 1.0


def test_a_dead_process_is_a_truncated_step(env: gymnasium.Env[str, Any]) -> None:
    env.reset(seed=0)
    assert env.step("die") == ("", 0.0, False, True, {"failure": "died"})


def test_a_host_that_is_killed_costs_its_rollout_and_is_no_reward(scripted: Scripted) -> None:
    answers = iter(["end", "end", "be killed", "end"])
    engine = scripted(lambda prompt_ids, sample: next(answers))
    group = play_group(lambda: rlenv.make("tests/obedient-v0", engine=engine, step_timeout_s=5.0))
    assert [row.reward for row in group.trajectories] == [1.0] * 3
    [failure] = group.failures
    assert (failure.cause, failure.task) == ("died", "tests/obedient-v0")
    tally = Tally()
    tally.add_rollouts(group)
    assert (tally.rollouts, tally.failures) == (4, {"died": 1})
    scored = score([group])
    assert (len(scored.trajectories), scored.failures) == (3, {"died": 1})
    assert workers() == []


def test_an_exception_of_the_task_arrives_as_itself(env: gymnasium.Env[str, Any]) -> None:
    env.reset(seed=0)
    with pytest.raises(ZeroDivisionError, match="by the task"):
        env.step("raise")
    with pytest.raises(rlenv.EnvError, match="Unpicklable: odd"):
        env.step("raise oddly")
    assert env.step("ok")[1] == 1.0


def test_a_task_that_cannot_be_made_leaves_no_process() -> None:
    with pytest.raises(rlenv.ConfigError, match="no level 99"):
        rlenv.make("math-v0", level=99, step_timeout_s=1.0)
    with pytest.raises(rlenv.ConfigError, match="step_timeout_s=0"):
        rlenv.make("math-v0", step_timeout_s=0)
    assert workers() == []


def test_closing_twice_leaves_no_process(env: gymnasium.Env[str, Any]) -> None:
    env.reset(seed=0)
    env.close()
    env.close()
    assert workers() == []
    with pytest.raises(ResetNeeded):
        env.step("ok")


@pytest.mark.slow
def test_hanging_slots_of_a_vector_are_flagged_and_the_others_step_on() -> None:
    envs = rlenv.make_vec("tests/obedient-v0", 16, step_timeout_s=2.0)
    envs.reset(seed=0)
    began = time.monotonic()
    envs.send(["sleep", "spin"] + ["ok"] * 14)
    slots, *_ = envs.recv(14)
    assert set(slots) == set(range(2, 16))
    assert time.monotonic() - began < 1.5
    slots, _, rewards, terminations, truncations, infos = envs.recv(2)
    assert time.monotonic() - began < 5
    assert list(slots) == [0, 1]
    assert list(rewards) == [0.0, 0.0]
    assert not terminations.any() and truncations.all()
    assert list(infos["failure"]) == ["timeout"] * 2
    observations, *_ = envs.step("ok")  # NEXT_STEP: the two that hung are reset, in new processes
    assert observations[0].isdigit() and observations[2] == "well done"
    envs.close()
    assert workers() == []


def test_a_hanging_step_of_a_coroutine_is_counted_and_does_not_hold_up_the_loop(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "spin" if sample.seed == 1 else "ok")
    envs = [rlenv.make("tests/obedient-v0", engine=engine, step_timeout_s=1.0) for _ in range(4)]

    async def run() -> tuple[list[Any], float]:
        await asyncio.gather(*(env.areset(seed=0) for env in envs))
        steps = asyncio.gather(*(env.astep(rlenv.Sample(seed=seed)) for seed, env in enumerate(envs)))
        lag = 0.0
        while not steps.done():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            lag = max(lag, time.monotonic() - began)
        return await steps, lag

    steps, lag = asyncio.run(run())
    assert [step[1] for step in steps] == [1.0, 0.0, 1.0, 1.0]
    assert steps[1][4]["failure"] == "timeout"
    assert lag < 0.5
    for env in envs:
        env.close()


@pytest.mark.slow
def test_a_hanging_reset_is_a_failure_of_that_episode_alone(scripted: Scripted) -> None:
    env = rlenv.make("tests/obedient-v0", engine=scripted(lambda ids, sample: "ok"), step_timeout_s=1.0)
    assert env.reset(seed=0, options={"nap": 60})[1] == {"failure": "timeout"}
    assert env.step(rlenv.Sample())[1:] == (0.0, False, True, {"failure": "timeout"})
    assert env.reset(seed=0)[1] == {}
    assert env.step(rlenv.Sample())[1] == 1.0
    env.close()


@pytest.mark.slow
def test_a_killed_parent_leaves_no_spinning_worker(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, os, threading, rlenv
        class Spin(rlenv.TextEnv):
            def start(self, options):
                return str(os.getpid())
            def turn(self, action):
                while True:
                    pass
        if __name__ == "__main__":
            rlenv.register("tests/spin-v0", Spin)
            env = rlenv.make("tests/spin-v0", step_timeout_s=600.0)
            print(env.reset()[0], flush=True)
            threading.Timer(0.5, lambda: os.kill(os.getpid(), 9)).start()
            env.step("go")
        """)
    )
    parent = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    worker = Path(f"/proc/{int(parent.stdout)}")
    assert parent.returncode == -9
    deadline = time.monotonic() + 10
    while worker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.exists()
