"""A spec and its arguments go in, an environment comes out whose step limit never hides that a task is over."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import TimeLimit

from rlenv.errors import ConfigError

NO_LIMIT = -1  # Gymnasium's word for it


class StepLimit(TimeLimit):
    """Gymnasium's TimeLimit, but for an episode that the task ends on the very last step: that is terminated only.

    `info["truncated_by"]` is "max_episode_steps" where this limit ended the episode.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        if self._steps >= self._max_episode_steps and not (terminated or truncated):
            return observation, reward, False, True, {**info, "truncated_by": "max_episode_steps"}
        return observation, reward, terminated, truncated, info


def make_env(spec: EnvSpec, max_episode_steps: int | None = None, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """`gymnasium.make`, with a StepLimit where that puts its TimeLimit. Raises ConfigError for a limit below 1."""
    limit = spec.max_episode_steps if max_episode_steps is None else max_episode_steps
    if limit is None or limit == NO_LIMIT:
        return gymnasium.make(spec, max_episode_steps, **kwargs)
    if limit < 1:
        raise ConfigError(f"max_episode_steps={limit} leaves no step: give 1 or more, or {NO_LIMIT} for no limit")
    unlimited = copy.copy(spec)  # replace() would set up an id's namespace and version again
    unlimited.max_episode_steps = None
    return StepLimit(gymnasium.make(unlimited, **kwargs), limit)
