"""Limits on the steps of an episode go in; which flag ends it, and when, comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest

import rlenv

RIGHT, WRONG = "right", "wrong"


class Patient(rlenv.TextEnv):
    """Over when the action is right, however many turns that takes."""

    def start(self, options: Any) -> str:
        return "?"

    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn(float(action == RIGHT), "go on", terminated=action == RIGHT)


@pytest.fixture(autouse=True)
def tasks() -> Iterator[None]:
    rlenv.register("limits/patient-v0", Patient)
    rlenv.register("limits/hurried-v0", Patient, max_episode_steps=2)
    yield
    for name in ("patient", "hurried"):
        gymnasium.registry.pop(f"limits/{name}-v0")


def flags(env: gymnasium.Env[str, Any], *actions: str) -> list[tuple[bool, bool, str | None]]:
    env.reset(seed=0)
    steps = [env.step(action) for action in actions]
    return [(terminated, truncated, info.get("truncated_by")) for _, _, terminated, truncated, info in steps]


GOES_ON, OVER = (False, False, None), (True, False, None)


@pytest.mark.parametrize(
    ("task", "limits", "cut_by"),
    [
        ("limits/patient-v0", {"max_turns": 2}, "max_turns"),
        ("limits/patient-v0", {"max_episode_steps": 2}, "max_episode_steps"),
        ("limits/patient-v0", {"max_episode_steps": 2, "max_turns": 4}, "max_episode_steps"),
        ("limits/patient-v0", {"max_episode_steps": 4, "max_turns": 2}, "max_turns"),
        ("limits/patient-v0", {"max_episode_steps": 2, "max_turns": 2}, "max_turns"),
        ("limits/hurried-v0", {}, "max_episode_steps"),
    ],
)
def test_the_smaller_limit_truncates_and_a_task_over_on_the_last_step_is_terminated_only(
    task: str, limits: dict[str, int], cut_by: str
) -> None:
    env = rlenv.make(task, **limits)
    assert flags(env, WRONG, WRONG) == [GOES_ON, (False, True, cut_by)]
    assert flags(env, WRONG, RIGHT) == [GOES_ON, OVER]
    assert flags(env, RIGHT) == [OVER]


def test_a_limit_holds_in_a_process_of_its_own_and_in_a_vector() -> None:
    env = rlenv.make("math-retry-v0", max_episode_steps=1, step_timeout_s=30.0)
    assert flags(env, WRONG) == [(False, True, "max_episode_steps")]
    env.close()
    envs = rlenv.make_vec("limits/patient-v0", 2, max_episode_steps=1)
    envs.reset(seed=0)
    _, _, terminations, truncations, _ = envs.step((WRONG, RIGHT))
    assert (terminations.tolist(), truncations.tolist()) == ([False, True], [True, False])


def test_a_registered_limit_may_be_lifted_or_replaced() -> None:
    assert flags(rlenv.make("limits/hurried-v0", max_episode_steps=-1), *[WRONG] * 5) == [GOES_ON] * 5
    assert flags(rlenv.make("limits/hurried-v0", max_episode_steps=3), *[WRONG] * 3)[-1][:2] == (False, True)
    assert rlenv.spec("limits/hurried-v0").max_episode_steps == 2


def test_a_limit_is_part_of_the_spec_and_makes_the_same_again() -> None:
    env = rlenv.make("math-v0", max_episode_steps=3, level=3)
    assert env.spec is not None and env.spec.max_episode_steps == 3
    again = rlenv.make(env.spec)
    assert again.spec == env.spec and str(again) == str(env)


def test_a_limit_of_no_step_is_refused() -> None:
    with pytest.raises(rlenv.ConfigError, match="max_episode_steps=0"):
        rlenv.make("math-v0", max_episode_steps=0)
