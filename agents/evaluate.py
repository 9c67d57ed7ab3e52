"""A policy and held-out problems go in, mean reward and mean response length come out."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import rlenv
from rlenv.errors import GroupError
from rlenv.types import Group

SEEDS_PER_PROBLEM = 20  # a task with fewer problems than asked for is given up on after this many draws for each


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over `problems` episodes. For a task that pays 1 or 0, `accuracy`, the mean reward, is just that.

    `length` counts sampled ids. Rollouts that failed are in neither mean, but in `failures`, by cause.
    """

    problems: int
    accuracy: float
    length: float
    failures: dict[str, int] = field(default_factory=dict)


def held_out(task: str) -> dict[str, Any]:
    """The arguments of `rlenv.make` for the held-out side of a task: its `split="eval"`, if it has splits.

    A task without splits is told apart by seeds alone: its texts may recur in training.
    """
    return _split(task, "eval")


def training(task: str) -> dict[str, Any]:
    """The arguments of `rlenv.make` for the training side of a task."""
    return _split(task, "train")


def distinct_seeds(task: str, count: int) -> list[int]:
    """The first seeds that give `count` held-out problems with different texts; fewer if the task has not so many.

    They do not depend on the run, so that all runs are measured on the same problems.
    """
    env = rlenv.make(task, **held_out(task))
    seen: dict[str, int] = {}
    for seed in range(count * SEEDS_PER_PROBLEM):
        if len(seen) == count:
            break
        observation, _ = env.reset(seed=seed)
        seen.setdefault(observation, seed)
    env.close()
    return list(seen.values())


async def evaluate(rollout: Callable[[int, int], Awaitable[Group]], seeds: Sequence[int]) -> Evaluation:
    """Roll out one episode a seed, all at once, through the path that training takes.

    `rollout(id, seed)` gives a group of one. Raises GroupError when every episode failed, and what a rollout raised,
    which ends the others.
    """
    tasks = [asyncio.ensure_future(rollout(id, seed)) for id, seed in enumerate(seeds)]
    try:
        groups = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rows = [row for group in groups for row in group.trajectories]
    failures = Counter(failure.cause for group in groups for failure in group.failures)
    if not rows:
        example = next(itertools.chain.from_iterable(group.failures for group in groups), None)
        raise GroupError(f"every rollout of the evaluation failed: {dict(failures)}, for example: {example}")
    return Evaluation(
        problems=len(rows),
        accuracy=sum(row.reward for row in rows) / len(rows),
        length=sum(sum(row.loss_mask) for row in rows) / len(rows),
        failures=dict(failures),
    )


def _split(task: str, name: str) -> dict[str, Any]:
    env = rlenv.make(task)
    has_splits = "split" in inspect.signature(type(env.unwrapped).__init__).parameters
    env.close()
    return {"split": name} if has_splits else {}
