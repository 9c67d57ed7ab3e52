"""Agents, environments and ways to play them, shared by the tests of rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import rlenv
from rlenv.bound import EngineBoundEnv
from rlenv.rollout import EnvPool, rollout, rollout_group
from rlenv.types import Group, Sample, View


class Sampler:
    """Always samples in the same way, and remembers what it saw."""

    def __init__(self, sample: Sample | None = None) -> None:
        self.sample = sample or Sample()
        self.views: list[View] = []

    def act(self, view: View) -> Sample:
        self.views.append(view)
        return self.sample


class Echo(rlenv.TextEnv):
    """Says `replies` one by one, a point each, and is over with the last; each seed has a question of its own."""

    def __init__(self, *replies: str) -> None:
        super().__init__()
        self.replies = replies

    def start(self, options: Mapping[str, Any]) -> str:
        return f"question {self.np_random.integers(1000)}"

    def turn(self, action: str) -> rlenv.Turn:
        assert self.turns is not None
        reply = self.replies[self.turns - 1]
        return rlenv.Turn(1.0, reply, terminated=self.turns == len(self.replies), info={"said": action})


class Raising(Echo):
    """Raises on its second turn when told to."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("ok", "ok")
        self.error = error

    def turn(self, action: str) -> rlenv.Turn:
        if self.turns == 2 and self.error is not None:
            raise self.error
        return super().turn(action)


class Abstaining(Echo):
    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn(abstained="the reference has no value")


def play(env: EngineBoundEnv, agent: Any = None, **options: Any) -> Any:
    return asyncio.run(rollout(env, agent or Sampler(), seed=0, **options))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def play_group(make: Callable[[], EngineBoundEnv], agent: Any = None, **options: Any) -> Group:
    async def scenario() -> Group:
        pool = EnvPool(make)
        try:
            return await rollout_group(pool, agent or Sampler(), **{"id": 0, "seed": 0, "group_size": 4, **options})
        finally:
            pool.close()

    return asyncio.run(scenario())
