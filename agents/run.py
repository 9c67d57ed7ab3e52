"""A config goes in; the policy is evaluated, trained and evaluated again, and a run folder comes out.

engine and learner start side by side → eval before → loop → eval after → model, curves, summary
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import rlenv
from rlenv.agents.config import TrainConfig
from rlenv.agents.display import Display
from rlenv.agents.evaluate import distinct_seeds, evaluate, held_out, training
from rlenv.agents.loop import Learner, Rollout, TrainLoop
from rlenv.agents.report import Report, RunResult
from rlenv.agents.revival import Revival
from rlenv.agents.sampler import MakeAgent, Sampler
from rlenv.agents.tally import StepRow, Tally
from rlenv.bound import EngineBoundEnv
from rlenv.engine.base import Engine
from rlenv.rollout import Agent, EnvPool, rollout_group
from rlenv.trajectories import TrajectoryFolder
from rlenv.types import Group, Sample


class SavingLearner(Learner, Protocol):
    """What a whole run needs of a learner."""

    async def save(self, folder: Path) -> None:
        """Write model and tokenizer for transformers; the folder appears whole."""


# Starts an engine and a learner of the same weights, and ends both.
OpenParts = Callable[[TrainConfig], AbstractAsyncContextManager[tuple[Engine, SavingLearner]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One whole run; calling it makes it happen. Whatever ends it, the run folder says so before the error goes on."""

    config: TrainConfig
    display: Display
    open_parts: OpenParts
    make_agent: MakeAgent = Sampler

    async def __call__(self) -> RunResult:
        with Report(self.config) as report, self.display:
            self.display.phase(f"{report.folder.path}: starting engine and learner")
            async with self.open_parts(self.config) as (engine, learner):
                self.display.phase(f"ready after {report.wall_s:.0f} s")
                report.update({"status": "running"})
                revival = Revival(engine, learner, Tally())
                await self._evaluate(engine, revival, report, "before")
                await self._train(engine, learner, revival, report)
                await self._evaluate(engine, revival, report, "after")
                report.update(revival.tally.summary())  # the last evaluation may have restarted the engine
                await learner.save(report.folder.model)
            return report.done()

    async def _train(self, engine: Engine, learner: Learner, revival: Revival, report: Report) -> None:
        config = self.config
        agent = self._agent(config.temperature)
        with (
            self._rollouts(engine, agent, config.group_size, training(config.task)) as sampled,
            self._recorded(sampled, report) as rollout,
        ):

            def on_step(row: StepRow) -> None:
                report.step(row, loop.tally.summary())
                self.display.step(row)

            loop = TrainLoop(engine, learner, rollout, config, on_step, revival)
            try:
                await loop.run()
            finally:
                report.update(loop.tally.summary())

    async def _evaluate(self, engine: Engine, revival: Revival, report: Report, when: str) -> None:
        config = self.config
        if config.eval_problems == 0:
            return
        seeds = await asyncio.to_thread(distinct_seeds, config.task, config.eval_problems)
        results = []
        for temperature in (1.0, 0.0):
            with self._rollouts(engine, self._agent(temperature), 1, held_out(config.task)) as rollout:
                results.append(await evaluate(_outliving(revival, rollout), seeds))
        sampled, greedy = results
        report.evaluation(when, sampled, greedy)
        self.display.phase(
            f"held-out {when}: {sampled.accuracy:.3f} at temperature 1 (length {sampled.length:.1f}), "
            f"{greedy.accuracy:.3f} greedy, {sampled.problems} problems"
        )

    @contextlib.contextmanager
    def _recorded(self, rollout: Rollout, report: Report) -> Iterator[Rollout]:
        """The same rollouts, of which each group is kept in the run folder, if that was asked for."""
        if not self.config.save_trajectories:
            yield rollout
            return

        async def roll(id: int, seed: int) -> Group:
            group = await rollout(id, seed)
            await asyncio.to_thread(kept.add, group)
            return group

        with contextlib.closing(TrajectoryFolder(report.folder.trajectories)) as kept:
            yield roll

    def _agent(self, temperature: float) -> Agent:
        return self.make_agent(Sample(temperature=temperature, max_tokens=self.config.max_tokens))

    @contextlib.contextmanager
    def _rollouts(self, engine: Engine, agent: Agent, group_size: int, options: dict[str, Any]) -> Iterator[Rollout]:
        """Groups of rollouts over a pool of environments bound to the engine."""

        def make() -> EngineBoundEnv:
            env = rlenv.make(self.config.task, engine=engine, **options)
            assert isinstance(env, EngineBoundEnv)
            return env

        async def roll(id: int, seed: int) -> Group:
            return await rollout_group(pool, agent, id=id, seed=seed, group_size=group_size, run_seed=self.config.seed)

        with contextlib.closing(EnvPool(make)) as pool:
            yield roll


def _outliving(revival: Revival, rollout: Rollout) -> Rollout:
    """The same rollouts, each begun anew when the engine dies under it."""

    async def roll(id: int, seed: int) -> Group:
        return await revival.outlive(functools.partial(rollout, id, seed))

    return roll
