"""A group shares one task and differs in sampling; its environments are used again, by one rollout at a time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from episodes import Echo, Raising, Sampler, play_group

import rlenv
from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.rollout import EnvPool, rollout_group
from rlenv.types import Group

Scripted = Callable[..., ScriptedEngine]


def test_group_shares_a_task_and_differs_in_sampling(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: f"{random.Random(sample.seed).random()}")
    make = lambda: EngineBoundEnv(Echo("ok"), engine)  # noqa: E731
    first, second = (play_group(make, group_size=8, seed=3) for _ in range(2))
    assert len({row.messages[0]["content"] for row in first.trajectories}) == 1
    assert len({row.token_ids for row in first.trajectories}) == 8
    assert len({row.info["sample_seed"] for row in first.trajectories}) == 8
    assert first == second
    assert {row.seed for row in first.trajectories} == {first.seed} == {3}
    for other in ({"run_seed": 1}, {"id": 1}):
        differing = play_group(make, group_size=8, seed=3, **other)
        assert not {r.info["sample_seed"] for r in first.trajectories} & {
            r.info["sample_seed"] for r in differing.trajectories
        }


def test_group_may_leave_the_seeds_to_the_engine(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: f"{sample.seed}")
    group = play_group(lambda: EngineBoundEnv(Echo("ok"), engine), seeded=False)
    assert {row.messages[1]["content"] for row in group.trajectories} == {"None"}
    assert {row.info["sample_seed"] for row in group.trajectories} == {None}


def test_members_of_a_group_are_in_the_engine_together(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc", delay=0.05)
    play_group(lambda: EngineBoundEnv(Echo("ok"), engine), group_size=8)
    assert engine.peak_in_flight == 8


def test_environments_are_used_again_and_never_by_two_at_once(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc")
    made: list[EngineBoundEnv] = []

    class Guarded(Echo):
        def turn(self, action: str) -> rlenv.Turn:
            assert self.mine.acquire(blocking=False)
            time.sleep(0.002)
            self.mine.release()
            return super().turn(action)

        def start(self, options: Mapping[str, Any]) -> str:
            self.mine = threading.Lock()
            return super().start(options)

    def make() -> EngineBoundEnv:
        made.append(EngineBoundEnv(Guarded("ok", "ok"), engine))
        return made[-1]

    async def scenario() -> list[Group]:
        pool = EnvPool(make)
        groups = []
        for id in range(3):
            pair = [rollout_group(pool, Sampler(), id=2 * id + i, seed=id, group_size=4) for i in range(2)]
            groups += await asyncio.gather(*pair)
        pool.close()
        return groups

    groups = asyncio.run(scenario())
    assert sum(len(group.trajectories) for group in groups) == 24
    assert len(made) == 8


def test_environment_that_raised_is_closed_and_replaced(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc")
    closed: list[str] = []

    class Closing(Raising):
        def close(self) -> None:
            closed.append(str(self.error))
            raise OSError("and cannot even be closed")

    errors = [None, ValueError("broken")]

    async def scenario() -> tuple[Group, Group]:
        pool = EnvPool(lambda: EngineBoundEnv(Closing(errors.pop() if errors else None), engine))
        return tuple([await rollout_group(pool, Sampler(), id=id, seed=0, group_size=2) for id in range(2)])

    first, second = asyncio.run(scenario())
    assert (len(first.failures), len(second.failures)) == (1, 0)
    assert closed == ["broken"]
