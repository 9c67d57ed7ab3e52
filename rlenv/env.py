"""A task author's prompt and verdicts go in, a `gymnasium.Env[str, str]` comes out.

class Capitals(TextEnv):
    def start(self, options):
        self.country, self.answer = ROWS[self.np_random.integers(len(ROWS))]
        return f"What is the capital of {self.country}?"

    def turn(self, action):
        return Turn(float(action.strip() == self.answer))
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from rlenv.errors import ConfigError
from rlenv.spaces import Text
from rlenv.types import Sample


@dataclass(frozen=True, slots=True)
class Turn:
    """The task's answer to one action.

    `reward` is a number, or named parts whose sum it is: `{"answer": 1.0, "format": 0.1}`. `observation` is
    what the policy is told next. `terminated` is the task's verdict that the episode is over; a limit is not
    the task's business. `abstained` says why the grader could not judge: such a turn has no reward.

    >>> Turn(1.0)                                                         # right, and over
    >>> Turn(observation="Wrong. Try once more.", terminated=False)       # go on
    """

    reward: float | Mapping[str, float] = 0.0
    observation: str = ""
    terminated: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
    abstained: str = ""


class TextEnv(gymnasium.Env[str, str], abc.ABC):
    """Base of a task: text in, text out. Write `start` and `turn`; draw only from `self.np_random`.

    `max_turns` ends an episode with `truncated`; an episode that the task itself ends on that very turn is
    `terminated` only. `info` holds `rewards` (the named parts), `abstained` (the grader's reason, only when
    it could not judge) and `truncated_by` ("max_turns").
    """

    max_turns: int | None = None

    def __init__(self, *, max_turns: int | None = None) -> None:
        if max_turns is not None:
            self.max_turns = max_turns
        if self.max_turns is not None and self.max_turns < 1:
            raise ConfigError(f"max_turns={self.max_turns} leaves no turn: give 1 or more, or None for no limit")
        self.observation_space = Text()
        self.action_space = Text()
        self.turns: int | None = None  # taken in this episode; None when none is running

    @abc.abstractmethod
    def start(self, options: Mapping[str, Any]) -> str:
        """Choose a task with `self.np_random` and return its prompt. `options` are those of `reset`."""

    @abc.abstractmethod
    def turn(self, action: str) -> Turn:
        """Judge one action."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        prompt = self.start(options or {})
        self.turns = 0
        return prompt, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One turn. Raises ResetNeeded outside an episode, TypeError when the action is not text."""
        if isinstance(action, Sample):
            raise TypeError("no engine to sample from: give make(..., engine=...), or step on text")
        if not isinstance(action, str):
            raise TypeError(f"an action is text, not {type(action).__name__}")
        if self.turns is None:
            raise ResetNeeded("no episode is running: call reset() before step()")
        self.turns += 1
        turn = self.turn(action)
        truncated = not turn.terminated and self.turns == self.max_turns
        if turn.terminated or truncated:
            self.turns = None
        info = dict(turn.info)
        if isinstance(turn.reward, Mapping):
            info["rewards"] = {name: float(part) for name, part in turn.reward.items()}
        if turn.abstained:
            info["abstained"] = turn.abstained
        if truncated:
            info["truncated_by"] = "max_turns"
        return turn.observation, _total(turn.reward), bool(turn.terminated), truncated, info


def _total(reward: float | Mapping[str, float]) -> float:
    total = float(sum(reward.values()) if isinstance(reward, Mapping) else reward)
    if not math.isfinite(total):
        raise ValueError(f"the task's reward is {reward}: it must be finite (a grader that cannot judge abstains)")
    return total
