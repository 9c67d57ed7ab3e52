"""Finished groups enter; trajectories with an advantage each leave, and counts of the groups that gave none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlenv.types import Group, Trajectory

NO_SPREAD = 1e-6  # rewards closer than this, relative to their size, are equal: the rest is float noise


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows to train on: `trajectories[i]` has `advantages[i]`.

    Of `groups` that had a baseline, `zero_std_groups` had equal rewards (their advantages are exactly 0, if they
    are among the rows at all).
    Groups left with one survivor are dropped and counted in `lone_survivors`, those with none in
    `failed_groups`. `failures` counts failed rollouts by cause, over all groups.
    """

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    groups: int
    zero_std_groups: int
    lone_survivors: int
    failed_groups: int
    failures: Mapping[str, int]


def score(groups: Iterable[Group], *, filter_constant: bool = False) -> Scored:
    """Give each trajectory its advantage within its own group; failures are no part of the baseline.

    With `filter_constant`, groups of equal rewards are left out of the rows, unless there are no others: a batch
    without a row is no batch. Raises ValueError when a reward is not finite: an environment that cannot judge must
    fail or abstain.
    """
    scored: list[tuple[Group, list[float]]] = []
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for group in groups:
        failures.update(failure.cause for failure in group.failures)
        survivors = len(group.trajectories)
        if survivors < 2:
            counts["lone" if survivors else "failed"] += 1
            continue
        values = normalise([_reward(trajectory) for trajectory in group.trajectories])
        counts["groups"] += 1
        counts["zero_std"] += not any(values)
        scored.append((group, values))
    if filter_constant and counts["zero_std"] < counts["groups"]:
        scored = [(group, values) for group, values in scored if any(values)]
    return Scored(
        trajectories=tuple(trajectory for group, _ in scored for trajectory in group.trajectories),
        advantages=tuple(value for _, values in scored for value in values),
        groups=counts["groups"],
        zero_std_groups=counts["zero_std"],
        lone_survivors=counts["lone"],
        failed_groups=counts["failed"],
        failures=dict(failures),
    )


def normalise(rewards: Sequence[float]) -> list[float]:
    """(reward − mean) / population standard deviation; exactly 0.0 each where the rewards are equal.

    The group baseline of GRPO (arXiv 2402.03300, section 4.1.2). No epsilon joins the deviation: equal
    rewards are found first, so that float noise of 1e-9 is not blown up to advantages of ±1.
    """
    if are_equal(rewards):
        return [0.0] * len(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    return ((values - values.mean()) / values.std()).tolist()


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by no more than float noise, so that a group of them carries no signal."""
    values = np.asarray(rewards, dtype=np.float64)
    return bool(np.ptp(values) <= NO_SPREAD * max(1.0, float(np.abs(values).max())))


def _reward(trajectory: Trajectory) -> float:
    if not math.isfinite(trajectory.reward):
        raise ValueError(
            f"task {trajectory.task!r}, seed {trajectory.seed}: the reward is {trajectory.reward}; return a finite "
            "number, or raise, so that the rollout is counted as a failure"
        )
    return trajectory.reward
