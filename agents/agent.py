"""A task and a model go in, `train` gives back a trained model: the whole asynchronous trainer as one object."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rlenv.agents.config import TrainConfig, check_surroundings
from rlenv.agents.display import display_for
from rlenv.agents.parts import open_parts
from rlenv.agents.report import RunResult
from rlenv.agents.run import OpenParts, Run
from rlenv.agents.sampler import MakeAgent, Sampler


class AsyncAgent:
    """Trains a language model on a task by asynchronous reinforcement learning.

    >>> result = AsyncAgent("math-v0", model="Qwen/Qwen3-0.6B").train(steps=200)
    >>> result.summary["eval_after"], result.model

    `settings` are those of `TrainConfig`. `agent` makes, from a `Sample`, what decides on actions. `parts` opens the
    engine and the learner of a run, where they are not to be on this machine. Raises ConfigError for settings that
    cannot work, before anything is started.
    """

    def __init__(
        self,
        task: str,
        model: str | None = None,
        *,
        agent: MakeAgent = Sampler,
        parts: OpenParts = open_parts,
        **settings: Any,
    ) -> None:
        self.config = TrainConfig(task, model, **settings)
        self.make_agent, self.open_parts = agent, parts
        check_surroundings(self.config)

    def train(self, steps: int | None = None) -> RunResult:
        """Train, and wait for the end; works from a script and where an event loop runs already, as in a notebook.

        Raises ConfigError, GroupError, EngineError or LearnerError; the run folder then says how far it came.
        """
        run = self._run(steps)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run())
        return _run_in_thread(run)

    async def train_async(self, steps: int | None = None) -> RunResult:
        """`train`, awaited."""
        return await self._run(steps)()

    def _run(self, steps: int | None) -> Run:
        config = self.config if steps is None else replace(self.config, steps=steps)
        return Run(config, display_for(config.steps), self.open_parts, self.make_agent)


def _run_in_thread(run: Run) -> RunResult:
    """Run on an event loop of its own in a thread; an interrupt of the wait ends the run in order."""
    result: Future[RunResult] = Future()
    runner = asyncio.Runner()
    loop = runner.get_loop()
    task = loop.create_task(run())

    def work() -> None:
        try:
            with runner:
                result.set_result(loop.run_until_complete(task))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="rlenv run")
    thread.start()
    try:
        return result.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
