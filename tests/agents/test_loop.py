"""The loop: what overlaps, how stale a trained token may be, and how each kind of failure ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeLearner

from rlenv.agents.config import TrainConfig
from rlenv.agents.loop import TrainLoop, shuffle_rewards, task_seed
from rlenv.agents.tally import StepRow
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import EngineDeadError, GroupError, LearnerError, WeightUpdateError
from rlenv.types import Completion, Failure, Group, Sample, Trajectory, VersionSpan

Start = Callable[..., ScriptedEngine]


def row(completion: Completion, seed: int, reward: float) -> Trajectory:
    """A single-turn trajectory of one completion."""
    prompt, sampled = len(completion.prompt_ids), len(completion.token_ids)
    return Trajectory(
        task="t",
        seed=seed,
        token_ids=completion.prompt_ids + completion.token_ids,
        loss_mask=(False,) * prompt + (True,) * sampled,
        logprobs=(0.0,) * prompt + completion.logprobs,
        spans=tuple(VersionSpan(s.label, s.start + prompt, s.end + prompt) for s in completion.spans),
        messages=(),
        reward=reward,
        terminated=True,
        truncated=False,
        turns=1,
    )


class Rollouts:
    """Groups sampled on an engine; `breaks` says which member of which group fails, and how."""

    def __init__(self, engine: ScriptedEngine, size: int, breaks: Callable[[int, int], Exception | None]) -> None:
        self.engine, self.size, self.breaks = engine, size, breaks
        self.seeds: list[int] = []

    async def __call__(self, id: int, seed: int) -> Group:
        self.seeds.append(seed)
        members = await asyncio.gather(*(self.member(id, seed, member) for member in range(self.size)))
        return Group(
            id,
            "t",
            seed,
            tuple(member for member in members if isinstance(member, Trajectory)),
            tuple(member for member in members if isinstance(member, Failure)),
        )

    async def member(self, id: int, seed: int, member: int) -> Trajectory | Failure:
        error = self.breaks(id, member)
        if isinstance(error, ValueError):
            return Failure("t", seed, type(error).__name__, str(error))
        if error is not None:
            raise error
        completion = await self.engine.generate((1, 2, 3), Sample())
        if completion.finish_reason == "abort":
            return Failure("t", seed, "aborted", "by a swap")
        return row(completion, seed, float(member % 2))


def loop_of(
    engine: ScriptedEngine,
    learner: FakeLearner,
    *,
    breaks: Callable[[int, int], Exception | None] = lambda id, member: None,
    on_step: Callable[[StepRow], None] = lambda row: None,
    **settings: object,
) -> TrainLoop:
    config = replace(TrainConfig("t", steps=6, groups_per_step=3, group_size=4), **settings)
    return TrainLoop(engine, learner, Rollouts(engine, config.group_size, breaks), config, on_step)


def test_groups_that_a_swap_aborts_begin_anew_and_are_no_failure_of_the_run(scripted: Start) -> None:
    engine = scripted(lambda p, s: "abcdefgh", delay=0.01)
    loop = loop_of(engine, FakeLearner(0.005), pause="abort", staleness=3)
    asyncio.run(loop.run())
    summary = loop.tally.summary()
    assert summary["updates"] == 6
    assert summary["failures"]["aborted"] >= 3 * 4, "a whole batch was in flight at a swap"
    assert summary["dropped_too_few_survivors"] == 0


def test_async_mode_swaps_weights_while_requests_are_in_flight(scripted: Start) -> None:
    rows: list[StepRow] = []
    loop = loop_of(scripted(lambda p, s: "abcdef", delay=0.002), FakeLearner(0.005), on_step=rows.append)
    asyncio.run(loop.run())
    summary = loop.tally.summary()
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert summary["updates"] == summary["weight_updates"] == 6
    assert summary["weight_updates_mid_generation"] > 0
    assert 0 < summary["staleness_max"] <= 2


@pytest.mark.parametrize("settings", [{"mode": "sync"}, {"mode": "async", "staleness": 0}])
def test_without_staleness_every_token_is_of_the_version_that_trains_on_it(scripted: Start, settings: dict) -> None:
    learner = FakeLearner(0.002)
    loop = loop_of(scripted(lambda p, s: "abc", delay=0.001), learner, **settings)
    asyncio.run(loop.run())
    assert [batch.version for batch in learner.batches] == [0, 1, 2, 3, 4, 5]
    assert all(not batch.staleness[batch.live].any() for batch in learner.batches)
    assert loop.tally.summary()["weight_updates_mid_generation"] == 0


def test_one_step_off_trains_on_the_batch_before_and_swaps_between_batches(scripted: Start) -> None:
    learner = FakeLearner(0.002)
    loop = loop_of(scripted(lambda p, s: "abc", delay=0.001), learner, mode="one-step-off")
    asyncio.run(loop.run())
    lags = [set(batch.staleness[batch.live].tolist()) for batch in learner.batches]
    assert lags == [{0}, {1}, {1}, {1}, {1}, {1}]
    assert loop.tally.summary()["weight_updates_mid_generation"] == 0


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_lag_at_consumption_stays_within_the_bound_with_a_fast_engine_and_a_slow_learner(
    scripted: Start, bound: int
) -> None:
    learner = FakeLearner(0.003)
    loop = loop_of(scripted(lambda p, s: "ab"), learner, steps=30, groups_per_step=2, staleness=bound)
    asyncio.run(loop.run())
    lags = [int(batch.staleness[batch.live].max()) for batch in learner.batches]
    assert len(lags) == 30 and max(lags) <= bound
    assert loop.tally.summary()["staleness_max"] == max(lags)


def test_rollouts_and_learner_work_at_the_same_time(scripted: Start) -> None:
    """A batch takes 60 ms to sample and 60 ms to learn; overlapped, it should take little more than 60 ms."""

    def wall(mode: str) -> float:
        engine = scripted(lambda p, s: "abcde", delay=0.01)
        began = time.perf_counter()
        asyncio.run(loop_of(engine, FakeLearner(0.06), mode=mode, steps=5).run())
        return time.perf_counter() - began

    assert wall("async") < 0.85 * wall("sync")


def test_a_failed_rollout_is_counted_by_its_cause_and_the_others_train(scripted: Start) -> None:
    learner = FakeLearner()
    loop = loop_of(
        scripted(lambda p, s: "abc"),
        learner,
        mode="sync",
        breaks=lambda id, member: ValueError("boom") if (id, member) == (1, 2) else None,
    )
    asyncio.run(loop.run())
    assert loop.tally.summary()["failures"] == {"ValueError": 1}
    assert [batch.rows for batch in learner.batches] == [11, 12, 12, 12, 12, 12]


def test_a_group_with_one_survivor_is_replaced_and_counted(scripted: Start) -> None:
    learner = FakeLearner()
    loop = loop_of(
        scripted(lambda p, s: "abc"),
        learner,
        breaks=lambda id, member: ValueError("boom") if id == 1 and member else None,
    )
    asyncio.run(loop.run())
    assert loop.tally.summary()["dropped_too_few_survivors"] == 1
    assert [batch.rows for batch in learner.batches] == [12] * 6


def test_when_all_rollouts_of_a_batch_fail_the_run_stops_and_names_the_cause(scripted: Start) -> None:
    loop = loop_of(scripted(lambda p, s: "abc"), FakeLearner(), breaks=lambda id, member: ValueError("no sandbox"))
    with pytest.raises(GroupError, match=r"ValueError.*no sandbox"):
        asyncio.run(asyncio.wait_for(loop.run(), 5))


@pytest.mark.parametrize("error", [RuntimeError("producer broke"), EngineDeadError("engine 'e' died")])
def test_an_error_that_is_no_rollout_failure_ends_the_run_with_its_own_traceback(
    scripted: Start, error: Exception
) -> None:
    loop = loop_of(
        scripted(lambda p, s: "abc", delay=0.001),
        FakeLearner(),
        steps=1000,
        breaks=lambda id, member: error if id == 9 else None,
    )
    with pytest.raises(type(error), match=str(error)) as caught:
        asyncio.run(asyncio.wait_for(loop.run(), 5))
    assert caught.traceback[-1].name == "member"
    assert not isinstance(caught.value.__context__, BaseExceptionGroup)


def test_a_dead_learner_ends_the_run_and_leaves_no_request_in_flight(scripted: Start) -> None:
    engine = scripted(lambda p, s: "abc", delay=0.001)
    loop = loop_of(engine, FakeLearner(fails_at=2), steps=1000)
    with pytest.raises(LearnerError):
        asyncio.run(asyncio.wait_for(loop.run(), 5))
    assert loop.tally.steps == 1
    asyncio.run(engine.abort())
    assert engine.in_flight == 0


def test_a_learner_that_dies_while_rollouts_last_is_noticed_before_they_end(scripted: Start) -> None:
    async def body() -> None:
        learner = FakeLearner()
        run = asyncio.create_task(loop_of(scripted(lambda p, s: "abc" * 1000, delay=1.0), learner).run())
        await asyncio.sleep(0.05)
        learner.dead = True
        with pytest.raises(LearnerError):
            await asyncio.wait_for(run, 1)

    asyncio.run(body())


def test_a_refuted_update_stops_the_run_before_its_tokens_are_trained_on(scripted: Start) -> None:
    engine, learner = scripted(lambda p, s: "abc", delay=0.001, proof_delay=0.01), FakeLearner()
    engine.refuted |= {"2", "2#2"}
    loop = loop_of(engine, learner)
    with pytest.raises(WeightUpdateError) as caught:
        asyncio.run(asyncio.wait_for(loop.run(), 5))
    assert caught.value.version == 2
    assert [batch.version for batch in learner.batches] == [0, 1]
    assert loop.tally.summary()["canary_failures"] == 1


def test_a_retry_that_holds_goes_on_without_the_refuted_tokens(scripted: Start) -> None:
    engine, learner = scripted(lambda p, s: "abcdef", delay=0.001, proof_delay=0.01), FakeLearner()
    engine.refuted |= {"2"}
    loop = loop_of(engine, learner)
    asyncio.run(loop.run())
    summary = loop.tally.summary()
    assert summary["updates"] == 6 and summary["canary_failures"] == 1 and summary["dropped_unproven"] > 0


def test_cancelling_the_run_aborts_what_is_in_flight(scripted: Start) -> None:
    engine = scripted(lambda p, s: "abc" * 1000, delay=0.01)

    async def body() -> None:
        run = asyncio.create_task(loop_of(engine, FakeLearner()).run())
        await asyncio.sleep(0.05)
        assert engine.in_flight > 0
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.sleep(0.05)

    asyncio.run(body())
    assert engine.in_flight == 0


def test_idle_shares_say_which_side_waited(scripted: Start) -> None:
    slow_engine = loop_of(scripted(lambda p, s: "abcdefgh", delay=0.02), FakeLearner(), steps=3, staleness=0)
    asyncio.run(slow_engine.run())
    slow_learner = loop_of(scripted(lambda p, s: "a"), FakeLearner(0.15), steps=3, staleness=0)
    asyncio.run(slow_learner.run())
    assert slow_engine.tally.summary()["learner_idle"] > 0.8 > 0.2 > slow_engine.tally.summary()["engine_idle"]
    assert slow_learner.tally.summary()["engine_idle"] > 0.8 > 0.2 > slow_learner.tally.summary()["learner_idle"]


def test_rows_account_for_tokens_rewards_and_lengths(scripted: Start) -> None:
    rows: list[StepRow] = []
    loop = loop_of(scripted(lambda p, s: "abc"), FakeLearner(), on_step=rows.append, mode="sync")
    asyncio.run(loop.run())
    assert {row.reward for row in rows} == {0.5} and {row.length for row in rows} == {4.0}  # abc and the end token
    assert loop.tally.summary()["tokens"] == 6 * 12 * 4


def test_task_seeds_are_those_of_the_run_seed() -> None:
    assert [task_seed(0, i) for i in range(3)] == [task_seed(0, i) for i in range(3)]
    assert len({task_seed(s, i) for s in range(20) for i in range(200)}) == 4000


def test_shuffled_rewards_keep_their_distribution_and_lose_their_owners() -> None:
    completion = Completion("r", (1,), (2,), (-1.0,), (VersionSpan("0", 0, 1),), "", "stop")
    groups = [Group(g, "t", g, tuple(row(completion, g, float(g * 8 + m)) for m in range(8))) for g in range(8)]
    dealt = shuffle_rewards(groups, seed=3)
    before = [t.reward for g in groups for t in g.trajectories]
    after = [t.reward for g in dealt for t in g.trajectories]
    assert sorted(after) == before and after != before
    assert abs(np.corrcoef(before, after)[0, 1]) < 0.4
    assert [t.token_ids for g in dealt for t in g.trajectories] == [t.token_ids for g in groups for t in g.trajectories]
