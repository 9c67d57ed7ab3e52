"""A recorded episode goes in; its actions are played once more, without any engine, and what differs comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium

from rlenv.errors import ConfigError
from rlenv.registry import make
from rlenv.rollout import add_parts
from rlenv.trajectories import portable_spec, utf8
from rlenv.types import Failure, Trajectory

STEP_LIMIT_S = 60.0  # an episode may have been recorded because its environment hangs
# Causes that lie with the engine: an environment that plays the same actions knows nothing of them.
ENGINE_CAUSES = {"aborted", "prompt_too_long"}
_SHOWN = 60  # characters of a text that a difference quotes


@dataclass(slots=True)
class Outcome:
    """How an environment answered: one observation more than rewards, unless a `cause` took the last one's place."""

    observations: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    cause: str | None = None


def replay(recorded: Trajectory | Failure, env: gymnasium.Env[str, str] | None = None) -> list[str]:
    """Step the recorded actions through the task at the recorded seed; what came out otherwise, one sentence each.

    Without an `env` the task is made from the recorded spec, in a process of its own. Raises UnknownTaskError or
    ConfigError when it cannot be made as it was.
    """
    options = recorded.info.get("options")
    if options is None:
        raise ConfigError(f"the reset options of this episode of {recorded.task!r} were no JSON: it cannot be replayed")
    own = _made(recorded) if env is None else env
    try:
        again = _play(own, recorded.seed, options, actions_of(recorded))
    finally:
        if env is None:
            own.close()
    return _differences(_recorded(recorded), again)


def actions_of(recorded: Trajectory | Failure) -> list[str]:
    """What the policy said, turn by turn."""
    return [message["content"] for message in recorded.messages if message["role"] == "assistant"]


def _made(recorded: Trajectory | Failure) -> gymnasium.Env[str, str]:
    spec = recorded.info.get("spec")
    if spec is None or portable_spec(spec) is None:
        raise ConfigError(f"{recorded.task!r} was made from what is no JSON: make it yourself, for rlenv.replay.replay")
    try:
        return make(spec, step_timeout_s=STEP_LIMIT_S)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot make {recorded.task!r} again: {error}; replay it where its module is found"
        ) from error


def _recorded(recorded: Trajectory | Failure) -> Outcome:
    said = [message["content"] for message in recorded.messages if message["role"] == "user"]
    rewards = [*recorded.info.get("turn_rewards", ())]
    if isinstance(recorded, Failure):
        return Outcome(said, rewards, cause=recorded.cause)
    said += [""] * (len(rewards) + 1 - len(said))  # an episode's last words are no message when they are empty
    cut = recorded.truncated and recorded.info.get("truncated_by") != "context"  # that limit is the engine's
    return Outcome(said, rewards, dict(recorded.info.get("rewards", {})), recorded.terminated, cut)


def _play(env: gymnasium.Env[str, str], seed: int, options: dict[str, Any], actions: list[str]) -> Outcome:
    outcome = Outcome()
    try:
        observation, info = env.reset(seed=seed, options=options)
        outcome.observations.append(observation)
        for action in actions:
            if outcome.terminated or outcome.truncated or info.get("failure"):
                break
            observation, reward, outcome.terminated, outcome.truncated, info = env.step(action)
            if info.get("failure") or info.get("abstained"):
                break
            outcome.observations.append(observation)
            outcome.rewards.append(float(reward))
            outcome.parts = add_parts(outcome.parts, info)
    except Exception as error:
        outcome.cause = type(error).__name__
        return outcome
    outcome.cause = info.get("failure") or ("abstained" if info.get("abstained") else None)
    return outcome


def _differences(recorded: Outcome, again: Outcome) -> list[str]:
    if recorded.cause in ENGINE_CAUSES:
        recorded.cause = None
    found = [
        f"observation {turn} was {_short(was)}, and is {_short(now)}"
        for turn, (was, now) in enumerate(zip(recorded.observations, again.observations, strict=False))
        if utf8(was) != utf8(now)
    ]
    if recorded.cause != again.cause:
        found.append(f"it ended by {recorded.cause or 'a reward'}, and ends by {again.cause or 'a reward'}")
        return found
    if recorded.rewards != again.rewards:
        found.append(f"the rewards, turn by turn, were {recorded.rewards}, and are {again.rewards}")
    if recorded.cause is None and recorded.parts != again.parts:
        found.append(f"the named rewards were {recorded.parts}, and are {again.parts}")
    was, now = (recorded.terminated, recorded.truncated), (again.terminated, again.truncated)
    if recorded.cause is None and was != now:
        found.append(f"(terminated, truncated) was {was}, and is {now}")
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
