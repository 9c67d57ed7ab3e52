"""Small tasks go in; whether episodes, limits, rewards and seeds follow Gymnasium comes out."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import rlenv


class Guess(rlenv.TextEnv):
    """Guess a number; each wrong guess draws a hint, so that steps use the random stream, too."""

    def start(self, options: Mapping[str, Any]) -> str:
        self.number = int(self.np_random.integers(1000))
        return f"guess {self.number % 7}"

    def turn(self, action: str) -> rlenv.Turn:
        if action == str(self.number):
            return rlenv.Turn({"right": 1.0, "short": 0.25})
        return rlenv.Turn(observation=f"hint {self.np_random.integers(1000)}", terminated=False)


class Abstaining(Guess):
    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn(abstained="the reference is empty", info={"said": action})


def trajectory(env: gymnasium.Env[str, str], seed: int, actions: list[str]) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


def test_a_task_without_its_two_methods_cannot_be_made() -> None:
    class Half(rlenv.TextEnv):
        def start(self, options: Mapping[str, Any]) -> str:
            return ""

    with pytest.raises(TypeError, match="turn"):
        Half()


def test_named_rewards_are_summed_and_told() -> None:
    env = Guess()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(str(env.number))
    assert (reward, terminated, truncated) == (1.25, True, False)
    assert info == {"rewards": {"right": 1.0, "short": 0.25}}


def test_a_grader_that_abstains_says_why() -> None:
    env = Abstaining()
    env.reset(seed=0)
    *_, info = env.step("x")
    assert info == {"abstained": "the reference is empty", "said": "x"}


def test_a_reward_that_is_not_finite_is_the_tasks_fault() -> None:
    class Broken(Guess):
        def turn(self, action: str) -> rlenv.Turn:
            return rlenv.Turn(float("nan"))

    env = Broken()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="finite"):
        env.step("x")


def test_an_unsolved_episode_is_truncated_at_exactly_the_limit() -> None:
    env = Guess(max_turns=4)
    env.reset(seed=0)
    ends = [env.step("no")[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]
    env.reset(seed=0)
    assert env.step("no")[2:4] == (False, False)


def test_solved_on_the_last_turn_is_terminated_and_not_truncated() -> None:
    env = Guess(max_turns=4)
    env.reset(seed=0)
    for _ in range(3):
        env.step("no")
    *_, terminated, truncated, info = env.step(str(env.number))
    assert (terminated, truncated) == (True, False)
    assert "truncated_by" not in info


def test_the_smaller_of_two_limits_wins() -> None:
    for inner, outer in ((4, 2), (2, 4)):
        env = TimeLimit(Guess(max_turns=inner), outer)
        env.reset(seed=0)
        ends = [env.step("no")[2:4] for _ in range(2)]
        assert ends == [(False, False), (False, True)]


def test_a_limit_of_no_turns_is_refused() -> None:
    with pytest.raises(rlenv.ConfigError, match="max_turns=0"):
        Guess(max_turns=0)


def test_stepping_outside_an_episode_is_refused() -> None:
    env = Guess(max_turns=1)
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset(seed=0)
    env.step("no")
    with pytest.raises(ResetNeeded):
        env.step("x")


@pytest.mark.parametrize("action", [rlenv.Sample(), 3, None, b"x"])
def test_an_action_that_is_no_text_is_refused_with_a_hint(action: Any) -> None:
    env = Guess()
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"engine=|text"):
        env.step(action)
    assert env.turns == 0


@pytest.mark.parametrize("seed", [5, 0])
def test_resets_after_a_seed_repeat_across_instances_and_vary_within_one(seed: int) -> None:
    first, second = Guess(), Guess()
    opened = [[env.reset(seed=seed), env.reset(), env.reset()] for env in (first, second)]
    assert opened[0] == opened[1]
    assert len({observation for observation, _ in opened[0]}) > 1


def test_equal_seeds_and_actions_give_equal_trajectories_among_threads_and_noise() -> None:
    played: dict[int, list[Any]] = {}

    def play(number: int) -> None:
        env = Guess()
        steps: list[Any] = [env.reset(seed=9)]
        for _ in range(50):
            random.random()
            np.random.rand()
            steps.append(env.step("no"))
        played[number] = steps

    threads = [threading.Thread(target=play, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert played[0] == played[1]


def test_the_global_random_state_is_untouched() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    trajectory(Guess(), 3, ["no", "no"])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_reset_in_mid_episode_starts_counting_again() -> None:
    env = Guess(max_turns=3)
    env.reset(seed=0)
    env.step("no")
    env.step("no")
    env.reset()
    env.step("no")
    assert env.turns == 1


def test_a_copy_made_in_an_episode_continues_it_and_its_random_stream() -> None:
    env = Guess()
    env.reset(seed=1)
    env.step("no")
    twin = copy.deepcopy(env)
    assert [twin.step("no"), twin.reset()] == [env.step("no"), env.reset()]


def test_an_environment_that_was_not_started_can_be_pickled() -> None:
    twin = pickle.loads(pickle.dumps(Guess(max_turns=2)))
    assert trajectory(twin, 3, ["no", "no"]) == trajectory(Guess(max_turns=2), 3, ["no", "no"])


def test_closing_twice_is_closing_once() -> None:
    env = Guess()
    env.close()
    env.close()


def test_episode_statistics_count_every_episode_alike() -> None:
    class Three(Guess):
        def turn(self, action: str) -> rlenv.Turn:
            return rlenv.Turn(1.0, terminated=self.turns == 3)

    env = RecordEpisodeStatistics(Three())
    for episode in range(4):
        env.reset(seed=episode)
        infos = [env.step("x")[4] for _ in range(3)]
        assert (infos[-1]["episode"]["l"], infos[-1]["episode"]["r"]) == (3, 3.0)


def test_the_environment_checker_is_content() -> None:
    rlenv.register("tests/guess-v0", Guess)
    try:
        check_env(gymnasium.make("tests/guess-v0").unwrapped)
    finally:
        del gymnasium.registry["tests/guess-v0"]
