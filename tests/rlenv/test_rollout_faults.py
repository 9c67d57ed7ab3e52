"""What goes wrong in an episode becomes a counted failure, never a reward; what goes wrong elsewhere stops the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from episodes import Abstaining, Echo, Raising, Sampler, play, play_group, until

from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import EngineError
from rlenv.rollout import EnvPool, rollout, rollout_group
from rlenv.types import Failure, Sample, Trajectory, View

Scripted = Callable[..., ScriptedEngine]


def test_prompt_that_never_fits_is_a_failure_that_says_so(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: pytest.fail("asked the engine"), max_model_len=16)
    failure = play(EngineBoundEnv(Echo("ok"), engine))
    assert isinstance(failure, Failure)
    assert failure.cause == "prompt_too_long"


@pytest.mark.parametrize("error", [ValueError("broken"), TimeoutError("slow"), KeyError("x")])
def test_exception_of_an_environment_is_a_failure_named_by_its_type(scripted: Scripted, error: Exception) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc")
    failure = play(EngineBoundEnv(Raising(error), engine))
    assert isinstance(failure, Failure)
    assert (failure.cause, failure.seed) == (type(error).__name__, 0)
    assert str(error.args[0]) in failure.message


def test_exhausted_iterator_in_an_environment_hangs_nobody(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc")
    failure = play(EngineBoundEnv(Raising(StopIteration("dry")), engine))
    assert isinstance(failure, Failure)
    assert (failure.cause, failure.message) == ("RuntimeError", "the environment raised StopIteration: dry")


def test_one_bad_environment_of_sixteen_costs_one_rollout(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc")
    errors = [ZeroDivisionError("env 3") if i == 3 else None for i in range(16)]
    group = play_group(lambda: EngineBoundEnv(Raising(errors.pop()), engine), group_size=16)
    assert len(group.trajectories) == 15
    assert [failure.cause for failure in group.failures] == ["ZeroDivisionError"]
    assert {row.reward for row in group.trajectories} == {2.0}


def test_group_whose_every_rollout_failed_has_no_trajectory(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc")
    group = play_group(lambda: EngineBoundEnv(Raising(OSError("disk")), engine))
    assert (group.trajectories, len(group.failures)) == ((), 4)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_interrupts_pass_through(scripted: Scripted, error: BaseException) -> None:
    class Interrupted:
        def act(self, view: View) -> Sample:
            raise error

    engine = scripted(lambda prompt_ids, sample: "abc")
    with pytest.raises(type(error)):
        play(EngineBoundEnv(Echo("ok"), engine), Interrupted())
    with pytest.raises(type(error)):
        play_group(lambda: EngineBoundEnv(Echo("ok"), engine), Interrupted())


def test_fault_of_the_agent_is_not_blamed_on_an_environment(scripted: Scripted) -> None:
    class Faulty:
        def act(self, view: View) -> Sample:
            raise LookupError("in the agent")

    with pytest.raises(LookupError, match="in the agent"):
        play(EngineBoundEnv(Echo("ok"), scripted(lambda prompt_ids, sample: "abc")), Faulty())


def test_abstained_grader_is_a_failure_and_no_zero(scripted: Scripted) -> None:
    failure = play(EngineBoundEnv(Abstaining("ok"), scripted(lambda prompt_ids, sample: "abc")))
    assert isinstance(failure, Failure)
    assert (failure.cause, failure.message) == ("abstained", "the reference has no value")


def test_rollouts_that_an_update_aborted_are_failures_and_the_others_go_on(scripted: Scripted, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: [10] * (300 if sample.seed in slow else 5), delay=0.001)
    slow = {1, 4, 6}

    async def scenario() -> list[Trajectory | Failure]:
        envs = [EngineBoundEnv(Echo("ok"), engine) for _ in range(8)]
        playing = [
            asyncio.create_task(rollout(env, Sampler(Sample(seed=seed)), seed=0)) for seed, env in enumerate(envs)
        ]
        await until(lambda: engine.in_flight == 3 and sum(task.done() for task in playing) == 5)
        await engine.update_weights(sender, 1, mode="abort")
        return await asyncio.gather(*playing)

    outcomes = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert {i for i, outcome in enumerate(outcomes) if isinstance(outcome, Failure)} == slow
    assert {outcome.cause for outcome in outcomes if isinstance(outcome, Failure)} == {"aborted"}


def test_dead_engine_stops_the_run(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: [10] * 4000, delay=0.001)

    async def scenario() -> None:
        pool = EnvPool(lambda: EngineBoundEnv(Echo("ok"), engine))
        playing = asyncio.create_task(rollout_group(pool, Sampler(), id=0, seed=0, group_size=4))
        await until(lambda: engine.in_flight == 4)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="is closed"):
            await playing

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_cancelled_group_leaves_nothing_in_the_engine(scripted: Scripted) -> None:
    engine = scripted(lambda prompt_ids, sample: [10] * 4000, delay=0.001)

    async def scenario() -> None:
        pool = EnvPool(lambda: EngineBoundEnv(Echo("ok"), engine))
        playing = asyncio.create_task(rollout_group(pool, Sampler(), id=0, seed=0, group_size=4))
        await until(lambda: engine.in_flight == 4)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        pool.close()
        await engine.pause("wait")

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert engine.in_flight == 0
