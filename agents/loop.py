"""Rollouts and updates, overlapping: an engine and a learner go in, `steps` proven weight updates come out.

    rollouts (a coroutine)                            updates (a coroutine)
    ──────────────────────                            ─────────────────────
    admit    ◀─ waits for ── a free place ◀──────┐    take         ◀─ waits for ── B proven, fresh groups
    start    group i: environments and engine    │    advantages, pack
      ⋮      many groups at once                 │    learner.step              (in a process of its own)
    prove    ◀─ waits for ── the labels' proof   │    [one-step-off: ◀─ waits for ── running groups]
    put      ── wakes ── take                    │    engine.update_weights     (pause · transfer · resume · prove)
                                                 └─── version + 1  ── wakes ── admit

The engine generates while the learner steps, and in `async` mode also goes on, under new weights, with what it had
begun under the old. Only the staleness rule (`rlenv.agents.buffer`) couples the two, and a pace: when a whole batch
waits already, the learner is the slower side, and rollouts start evenly over its cycle rather than all at its start.
They are fresher so, and the engine is not idle when the next weights come.

A rollout that fails is data with a cause. A group that a swap in `abort` mode cut short begins anew. An engine that
dies is restarted, and what it had in flight begins anew (`rlenv.agents.revival`). Anything else that fails, on either
side, ends the loop at once with its own traceback.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from rlenv.agents.advantages import score
from rlenv.agents.buffer import GroupBuffer
from rlenv.agents.config import TrainConfig
from rlenv.agents.learner_types import StepMetrics
from rlenv.agents.packing import Batch, pack
from rlenv.agents.revival import Revival
from rlenv.agents.tally import StepRow, Tally
from rlenv.engine.base import Engine, UpdateReport, WeightSender
from rlenv.errors import GroupError, WeightUpdateError
from rlenv.types import Group

Rollout = Callable[[int, int], Awaitable[Group]]  # (group id, seed of its task) → the finished group
WATCH_PERIOD_S = 0.02


class Learner(WeightSender, Protocol):
    """What the loop needs of a learner."""

    async def step(self, batch: Batch) -> StepMetrics:
        """One update of the policy; raises LearnerError when its process failed."""

    def check(self) -> None:
        """Raise LearnerError if its process has ended."""


class TrainLoop:
    """One run of the loop. `on_step` is told of each step as soon as its weights are proven.

    What it returns is awaited before the next batch is taken: meanwhile rollouts go on, under these very weights.
    `revival` is that of the whole run, if the engine serves others before or after the loop.
    """

    def __init__(
        self,
        engine: Engine,
        learner: Learner,
        rollout: Rollout,
        config: TrainConfig,
        on_step: Callable[[StepRow], Awaitable[None] | None],
        revival: Revival | None = None,
    ) -> None:
        self._revival = revival or Revival(engine, learner, Tally())
        self.tally = self._revival.tally
        self.buffer = GroupBuffer(
            config.steps,
            config.groups_per_step,
            config.staleness_bound,
            engine.proven,
            resample_constant=config.constant_groups == "resample",
        )
        self._engine, self._learner, self._rollout = engine, learner, rollout
        self._config, self._on_step = config, on_step
        self._failed_in_a_row: list[Group] = []
        self._cycle_s = 0.0  # from one batch taken to the next

    async def run(self) -> None:
        """Train for `config.steps`. Raises GroupError, EngineError, LearnerError, or what an agent or task raised."""
        self.tally.begin()
        cause = None
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(self._rollouts()), tasks.create_task(self._watch())]
                await self._updates()
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as several:
            cause = first_cause(several)
        finally:
            self.tally.end()
        if cause is not None:
            raise cause

    async def _rollouts(self) -> None:
        async with asyncio.TaskGroup() as running:
            for id in itertools.count():
                await self.buffer.admit()
                running.create_task(self._revival.outlive(functools.partial(self._roll, id)))
                if self.buffer.waiting >= self.buffer.batch_groups:
                    await asyncio.sleep(self._cycle_s / self.buffer.batch_groups)

    async def _roll(self, id: int) -> None:
        while True:
            group = await self._rollout(id, task_seed(self._config.seed, id))
            self.tally.add_rollouts(group)
            if not self._swapped_away(group):
                break
        self._stop_if_all_fail(group)
        await self.buffer.put(group)

    def _swapped_away(self, group: Group) -> bool:
        """Whether a weight swap aborted some of it. It begins anew: keeping what had ended would favour the short."""
        return self._config.pause == "abort" and any(failure.cause == "aborted" for failure in group.failures)

    async def _updates(self) -> None:
        for version in range(1, self._config.steps + 1):
            began = time.perf_counter()
            groups = await self.buffer.take()
            taken = time.perf_counter()
            async with self._revival.learning:
                metrics = await self._learner.step(self._batch(groups, version - 1))
                self._revival.version = version
            learned = time.perf_counter()
            if self._config.mode == "one-step-off":
                await self.buffer.drained()
            drained = time.perf_counter()
            report = await self._revival.outlive(functools.partial(self._update_weights, version))
            await self.buffer.advance(version)
            row = self.tally.add_step(
                groups,
                metrics,
                report,
                dropped=self.buffer.dropped,
                wait_s=taken - began + drained - learned,
                learn_s=learned - taken,
                update_s=time.perf_counter() - drained,
            )
            if (more := self._on_step(row)) is not None:
                await more
            self._cycle_s = time.perf_counter() - began

    def _batch(self, groups: Sequence[Group], version: int) -> Batch:
        if self._config.shuffle_rewards:
            groups = shuffle_rewards(groups, seed=task_seed(self._config.seed, version))
        scored = score(groups, filter_constant=self._config.constant_groups == "filter")
        return pack(scored, version=version)

    async def _update_weights(self, version: int) -> UpdateReport:
        try:
            return await self._engine.update_weights(
                self._learner, version, mode=self._config.pause, clear_cache=self._config.clear_cache
            )
        except WeightUpdateError:
            self.tally.canary_failures += 1
            raise

    def _stop_if_all_fail(self, group: Group) -> None:
        """A batch's worth of groups without a single survivor, in a row, is not bad luck."""
        self._failed_in_a_row = [] if group.trajectories else [*self._failed_in_a_row, group]
        if len(self._failed_in_a_row) < self._config.groups_per_step:
            return
        failures = [failure for group in self._failed_in_a_row for failure in group.failures]
        (cause, count), *_ = Counter(failure.cause for failure in failures).most_common(1)
        example = next(failure.message for failure in failures if failure.cause == cause)
        raise GroupError(
            f"every rollout of a whole batch failed: {count} of {len(failures)} by {cause}, for example: {example}"
        )

    async def _watch(self) -> None:
        """Notice a learner that died, and add up the time in which the engine has no request in flight."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            self._learner.check()
            now = time.perf_counter()
            if self._engine.in_flight == 0:
                self.tally.engine_idle_s += now - before
            before = now


def task_seed(run_seed: int, number: int) -> int:
    """A seed of its own for the `number`-th group of a run, the same in every run with this seed."""
    return int(np.random.SeedSequence([run_seed, number]).generate_state(1)[0])


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same groups with all rewards of the batch dealt out anew: same distribution, no information."""
    rewards = [row.reward for group in groups for row in group.trajectories]
    dealt = iter(np.random.default_rng(seed).permutation(rewards).tolist())
    return [
        replace(group, trajectories=tuple(replace(row, reward=next(dealt)) for row in group.trajectories))
        for group in groups
    ]


def first_cause(error: BaseException) -> BaseException:
    """The error that came first, out of the groups that task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
