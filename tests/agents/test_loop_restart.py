"""The loop outlives its engine: one restart a death, lost rollouts asked again, and a bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from fakes import FakeLearner
from test_loop import loop_of

from rlenv.agents.packing import Batch
from rlenv.agents.revival import MAX_RESTARTS
from rlenv.agents.tally import StepRow
from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.group import EngineGroup
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import EngineDeadError, EngineError

Start = Callable[..., ScriptedEngine]


@pytest.fixture
def engine(scripted: Start) -> ScriptedEngine:
    return scripted(lambda prompt_ids, sample: "abcdef", delay=0.002)


class Killer(FakeLearner):
    """A learner that kills the engine in the middle of sending these versions."""

    def __init__(self, engine: ScriptedEngine, versions: set[int]) -> None:
        super().__init__()
        self.engine, self.versions = engine, versions

    def send(self, client: WeightSyncClient) -> Manifest:
        client.start_weight_update()
        if len(self.batches) in self.versions:
            self.versions.remove(len(self.batches))
            self.engine.kill()
        return super().send(client)


def kill_after(engine: ScriptedEngine, *steps: int) -> Callable[[StepRow], None]:
    return lambda row: engine.kill() if row.step in steps else None


def test_one_death_is_one_restart_and_all_lost_rollouts_are_asked_again(engine: ScriptedEngine) -> None:
    asked: Counter[tuple[int, int]] = Counter()
    learner = FakeLearner(0.01)
    loop = loop_of(engine, learner, on_step=kill_after(engine, 2))
    rollout = loop._rollout

    async def counted(id: int, seed: int) -> object:
        asked[id, seed] += 1
        return await rollout(id, seed)

    loop._rollout = counted
    asyncio.run(asyncio.wait_for(loop.run(), 10))
    summary = loop.tally.summary()
    assert (summary["updates"], summary["engine_restarts"], summary["canary_failures"]) == (6, 1, 0)
    assert summary["failures"] == {} and summary["dropped_unproven"] == 0
    ids = [id for id, _ in asked]
    assert len(ids) == len(set(ids)) == max(ids) + 1  # each id keeps its seed
    assert max(asked.values()) == 2 and sum(count == 2 for count in asked.values()) > 1
    assert [batch.rows for batch in learner.batches] == [12] * 6


def test_restart_brings_back_the_version_that_the_learner_holds(engine: ScriptedEngine) -> None:
    labels: list[str] = []
    restart = engine.restart

    async def recorded(*arguments: object) -> object:
        report = await restart(*arguments)
        labels.append(report.label)
        return report

    engine.restart = recorded
    loop = loop_of(engine, FakeLearner(), on_step=kill_after(engine, 2), mode="sync")
    asyncio.run(asyncio.wait_for(loop.run(), 10))
    assert labels == ["2#2"]
    assert engine.weight_version == 6


def test_death_during_an_update_is_outlived(engine: ScriptedEngine) -> None:
    learner = Killer(engine, {1, 4})
    loop = loop_of(engine, learner)
    asyncio.run(asyncio.wait_for(loop.run(), 10))
    summary = loop.tally.summary()
    assert (summary["updates"], summary["engine_restarts"], engine.weight_version) == (6, 2, 6)
    assert [batch.version for batch in learner.batches] == [0, 1, 2, 3, 4, 5]
    assert summary["staleness_max"] <= 2


def test_restart_waits_for_a_step_of_the_learner(engine: ScriptedEngine) -> None:
    class Stepping(FakeLearner):
        busy = False

        async def step(self, batch: Batch) -> object:
            self.busy = True
            if len(self.batches) == 1:
                engine.kill()
            try:
                return await super().step(batch)
            finally:
                self.busy = False

        def send(self, client: WeightSyncClient) -> Manifest:
            assert not self.busy
            return super().send(client)

    loop = loop_of(engine, Stepping(0.05))
    asyncio.run(asyncio.wait_for(loop.run(), 10))
    assert loop.tally.summary()["engine_restarts"] == 1


def test_tokens_whose_proof_died_with_the_engine_are_not_trained_on(scripted: Start) -> None:
    engine = scripted(lambda prompt_ids, sample: "abc", delay=0.001, proof_delay=0.03)
    learner = FakeLearner()
    loop = loop_of(engine, learner, steps=4)

    async def scenario() -> None:
        run = asyncio.create_task(loop.run())
        while engine.weight_version < 2:  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.001)
        engine.kill()  # version 2 serves and is not proven
        await run

    asyncio.run(asyncio.wait_for(scenario(), 10))
    with pytest.raises(EngineDeadError, match="before the weights '2' were proven"):
        asyncio.run(engine.proven(["2"]))
    assert loop.tally.summary()["engine_restarts"] == 1


def test_an_engine_that_dies_again_and_again_ends_the_run(engine: ScriptedEngine) -> None:
    loop = loop_of(engine, FakeLearner(), steps=50, on_step=kill_after(engine, *range(50)))
    with pytest.raises(EngineDeadError, match=r"engine 'scripted' died; \d+ requests were pending"):
        asyncio.run(asyncio.wait_for(loop.run(), 10))
    assert loop.tally.engine_restarts == MAX_RESTARTS


def test_a_restart_that_fails_ends_the_run_with_its_own_error(engine: ScriptedEngine) -> None:
    async def no_start(*arguments: object) -> object:
        raise EngineError("vLLM did not start")

    engine.restart = no_start
    loop = loop_of(engine, FakeLearner(), on_step=kill_after(engine, 1))
    with pytest.raises(EngineError, match="did not start"):
        asyncio.run(asyncio.wait_for(loop.run(), 10))


def test_death_of_one_engine_of_a_group_is_none_of_the_loops_business(scripted: Start) -> None:
    engines = [scripted(lambda prompt_ids, sample: "abcdef", delay=0.002) for _ in range(2)]
    with EngineGroup(engines) as group:
        learner = Killer(engines[1], {6})  # by then the first serves again
        loop = loop_of(group, learner, on_step=kill_after(engines[0], 1))
        asyncio.run(asyncio.wait_for(loop.run(), 10))
        summary = loop.tally.summary()
        assert (summary["updates"], summary["engine_restarts"], group.weight_version) == (6, 0, 6)
        assert [batch.rows for batch in learner.batches] == [12] * 6
        assert summary["failures"] == {}
