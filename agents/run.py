"""A config goes in; the policy is evaluated, trained and evaluated again, and a run folder comes out.

engine and learner start side by side → audit → eval before → loop → eval after → model, curves, summary
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import rlenv
from rlenv.agents.config import TrainConfig
from rlenv.agents.display import Display
from rlenv.agents.evaluate import Evaluation, distinct_seeds, evaluate, held_out, training
from rlenv.agents.gate import MAX_TOKENS, Scorer, audit, passage
from rlenv.agents.loop import Learner, Rollout, TrainLoop
from rlenv.agents.report import Report, RunResult
from rlenv.agents.revival import Revival
from rlenv.agents.sampler import MakeAgent, Sampler
from rlenv.agents.tally import StepRow, Tally
from rlenv.bound import EngineBoundEnv
from rlenv.engine.base import Engine
from rlenv.errors import CollapseError
from rlenv.rollout import Agent, EnvPool, rollout_group
from rlenv.trajectories import TrajectoryFolder
from rlenv.types import Group, Sample

SILENT_STEPS = 3  # without any signal, after which a person is told


class RunLearner(Learner, Scorer, Protocol):
    """What a whole run needs of a learner."""

    async def save(self, folder: Path) -> None:
        """Write model and tokenizer for transformers; the folder appears whole."""


# Starts an engine and a learner of the same weights, and ends both.
OpenParts = Callable[[TrainConfig], AbstractAsyncContextManager[tuple[Engine, RunLearner]]]


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
                revival = Revival(engine, learner, Tally(), self.display.phase)
                await self._audit(engine, learner, revival, report)
                await self._evaluate(engine, revival, report, "before")
                await self._train(engine, learner, revival, report)
                await self._evaluate(engine, revival, report, "after")
                report.update(revival.tally.summary())  # the last evaluation may have restarted the engine
                await learner.save(report.folder.model)
            return report.done()

    async def _audit(self, engine: Engine, learner: RunLearner, revival: Revival, report: Report) -> None:
        """Backend correctness comes before training: raises AuditError unless it is forced."""
        config = self.config
        limit = min(config.max_tokens or MAX_TOKENS, MAX_TOKENS)
        agent = self.make_agent(replace(config.sample, max_tokens=limit))
        with self._rollouts(engine, agent, config.group_size, training(config.task)) as rollout:
            verdict = await audit(
                _outliving(revival, rollout),
                learner,
                seed=config.seed,
                version=engine.weight_version,
                dtype=engine.dtype,
            )
        report.update({"audit": passage(verdict, force=config.force)})
        if verdict is not None:
            words = "passed" if verdict.passed else "FAILED, and training is forced"
            figures = f"max |Δ| {verdict.mismatch.abs_max:.1e} nats, k3 {verdict.mismatch.kl:.1e}"
            self.display.phase(f"audit {words}: {figures} over {verdict.mismatch.tokens} tokens")

    async def _train(self, engine: Engine, learner: Learner, revival: Revival, report: Report) -> None:
        config = self.config
        agent = self.make_agent(config.sample)
        with (
            self._rollouts(engine, agent, config.group_size, training(config.task)) as sampled,
            self._recorded(sampled, report) as rollout,
        ):

            async def on_step(row: StepRow) -> None:
                report.step(row, loop.tally.summary())
                self.display.step(row)
                for sign in row.collapse:
                    self.display.phase(f"step {row.step}: sampling and learning part ways: {sign}")
                if row.step == SILENT_STEPS and loop.tally.constant_groups == loop.tally.groups:
                    self.display.phase(
                        f"no signal in {row.step} steps: the rewards of every group are equal, at last {row.reward:g}"
                    )
                if row.collapse and config.on_collapse == "stop":
                    raise CollapseError(row.collapse[0])
                if config.eval_every and row.step % config.eval_every == 0:
                    await self._evaluate_at(row.step, engine, revival, report)

            loop = TrainLoop(engine, learner, rollout, config, on_step, revival)
            try:
                await loop.run()
            finally:
                report.update(loop.tally.summary())

    async def _evaluate(self, engine: Engine, revival: Revival, report: Report, when: str) -> None:
        if self.config.eval_problems == 0:
            return
        sampled, greedy = [await self._evaluated(engine, revival, temperature) for temperature in (1.0, 0.0)]
        report.evaluation(when, sampled, greedy)
        self.display.phase(
            f"held-out {when}: {sampled.accuracy:.3f} at temperature 1 (length {sampled.length:.1f}), "
            f"{greedy.accuracy:.3f} greedy, {sampled.problems} problems"
        )

    async def _evaluate_at(self, step: int, engine: Engine, revival: Revival, report: Report) -> None:
        """Between two steps, by the weights of the first: the next ones wait."""
        if self.config.eval_problems:
            report.evaluation_at(step, await self._evaluated(engine, revival, 1.0))

    async def _evaluated(self, engine: Engine, revival: Revival, temperature: float) -> Evaluation:
        seeds = await asyncio.to_thread(distinct_seeds, self.config.task, self.config.eval_problems)
        with self._rollouts(engine, self._agent(temperature), 1, held_out(self.config.task)) as rollout:
            return await evaluate(_outliving(revival, rollout), seeds)

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
