"""Every registered task goes in; conformance, determinism, and that only a right answer pays comes out."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from oracles import ALL_AT_ONCE, ORACLES

import rlenv

TASKS = [id for id in rlenv.list() if id.startswith("rlenv/")]
STRANGE = ["", "a b\nc", "π≈3.14 ✅", r"\frac{1}{2} \boxed{\sqrt{2}}", "\\boxed{", "}" * 50, "\x00"]

pytestmark = pytest.mark.parametrize("task", TASKS)


def finish(env: gymnasium.Env[str, Any], action: str) -> float:
    """The return of an episode that says the same on every turn."""
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(action)
        total, over = total + reward, terminated or truncated
    return total


def trajectory(env: gymnasium.Env[str, Any], seed: int) -> list[Any]:
    steps: list[Any] = [env.reset(seed=seed)]
    actions = iter(["wrong", "\\boxed{0}", "", "wrong"])
    while len(steps) == 1 or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(next(actions)))
    return steps


def test_the_environment_checker_is_content(task: str) -> None:
    check_env(rlenv.make(task).unwrapped)


def test_one_seed_and_the_same_actions_give_the_same_trajectory(task: str) -> None:
    assert trajectory(rlenv.make(task), 9) == trajectory(rlenv.make(task), 9)


@pytest.mark.parametrize("seed", [0, 5])
def test_resets_after_a_seed_repeat_and_vary(task: str, seed: int) -> None:
    opened = []
    for env in (rlenv.make(task), rlenv.make(task)):
        opened.append([env.reset(seed=seed)[0], *(env.reset()[0] for _ in range(4))])
    assert opened[0] == opened[1]
    assert len(set(opened[0])) > 1


def test_everything_it_says_and_hears_lies_in_its_spaces(task: str) -> None:
    env = rlenv.make(task)
    for seed in range(500):
        observation, _ = env.reset(seed=seed)
        assert observation in env.observation_space
    for action in STRANGE:
        env.reset(seed=0)
        assert action in env.action_space
        observation, *_ = env.step(action)
        assert observation in env.observation_space


def test_the_oracle_earns_the_full_reward(task: str) -> None:
    env = rlenv.make(task)
    for seed in range(100):
        env.reset(seed=seed)
        _, reward, terminated, truncated, _ = env.step(ORACLES[task](env))
        assert (reward, terminated, truncated) == (1.0, True, False)


def test_no_trick_earns_anything(task: str) -> None:
    env = rlenv.make(task)
    other = rlenv.make(task)
    other.reset(seed=10**6)
    stale = ORACLES[task](other)
    for seed in range(30):
        prompt, _ = env.reset(seed=seed)
        tricks = ["", prompt, prompt * 3, *ALL_AT_ONCE, *STRANGE]
        if stale != ORACLES[task](env):
            tricks.append(stale)
        for trick in tricks:
            env.reset(seed=seed)
            assert finish(env, trick) == 0.0, trick[:80]


def test_the_global_random_state_is_untouched(task: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    trajectory(rlenv.make(task), 3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_copies_pickles_and_specs_make_the_same_environment(task: str) -> None:
    env = rlenv.make(task)
    for twin in (
        copy.deepcopy(env),
        pickle.loads(pickle.dumps(env)),
        rlenv.make(EnvSpec.from_json(env.spec.to_json())),
    ):
        assert twin.reset(seed=4) == rlenv.make(task).reset(seed=4)
    env.reset(seed=4)
    assert copy.deepcopy(env).reset() == env.reset()


def test_closing_twice_is_closing_once(task: str) -> None:
    env = rlenv.make(task)
    env.reset(seed=0)
    env.close()
    env.close()


def test_it_declares_no_limit_as_an_end(task: str) -> None:
    env = rlenv.make(task, max_turns=1)
    env.reset(seed=0)
    *_, terminated, truncated, _ = env.step("wrong")
    assert terminated != truncated
    env.reset(seed=0)
    *_, terminated, truncated, _ = env.step(ORACLES[task](env))
    assert (terminated, truncated) == (True, False)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_its_vector_is_gymnasiums_vector(task: str, mode: AutoresetMode) -> None:
    ours = rlenv.make_vec(task, 3, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: gymnasium.make(task)] * 3, autoreset_mode=mode)
    assert ours.reset(seed=2)[0] == theirs.reset(seed=2)[0]
    for _ in range(4):
        mine, other = ours.step(("x", "\\boxed{1}", "")), theirs.step(("x", "\\boxed{1}", ""))
        assert mine[0] == other[0]
        assert all((mine[part] == other[part]).all() for part in (1, 2, 3))
