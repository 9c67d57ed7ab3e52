"""AsyncAgent: one object that trains, from a script and where an event loop runs already."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fakes import FakeLearner

from rlenv.agents import AsyncAgent, TrainConfig
from rlenv.agents.parts import learner_config
from rlenv.agents.run import OpenParts
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import ConfigError
from rlenv.types import Sample, View

Start = Callable[..., ScriptedEngine]
SMALL = {"steps": 2, "groups_per_step": 2, "group_size": 2, "eval_problems": 2}


@pytest.fixture
def parts(scripted: Start) -> OpenParts:
    """Whatever a run asks for, it gets a scripted engine."""
    engine = scripted(lambda prompt, sample: "\\boxed{1}", delay=0.001)

    @contextlib.asynccontextmanager
    async def opened(config: TrainConfig) -> AsyncIterator[tuple[ScriptedEngine, FakeLearner]]:
        yield engine, FakeLearner()

    return opened


def test_it_trains_from_a_plain_script(parts: OpenParts, tmp_path: Path) -> None:
    agent = AsyncAgent("math-v0", parts=parts, run_dir=str(tmp_path / "run"), **SMALL)
    assert agent.train(steps=3).summary["updates"] == 3


def test_it_trains_where_an_event_loop_runs_already(parts: OpenParts, tmp_path: Path) -> None:
    async def notebook() -> None:
        agent = AsyncAgent("math-v0", parts=parts, run_dir=str(tmp_path / "run"), **SMALL)
        assert agent.train().summary["updates"] == 2

    asyncio.run(notebook())


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_interrupt_in_a_notebook_ends_the_run_in_order(parts: OpenParts, tmp_path: Path) -> None:
    async def notebook() -> None:
        agent = AsyncAgent("math-v0", parts=parts, run_dir=str(tmp_path / "run"), **{**SMALL, "steps": 10_000})
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            agent.train()
        assert '"interrupted"' in (tmp_path / "run" / "summary.json").read_text()

    # asyncio.run would turn the signal into a cancellation, as no notebook does; a background job would ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(notebook())
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_agent_of_ones_own_decides_what_is_sampled(parts: OpenParts, tmp_path: Path) -> None:
    seen: list[float] = []

    class Curious:
        def __init__(self, sample: Sample) -> None:
            self.sample = sample

        def act(self, view: View) -> Sample:
            seen.append(self.sample.temperature)
            return self.sample

    AsyncAgent("math-v0", agent=Curious, parts=parts, run_dir=str(tmp_path / "run"), temperature=0.7, **SMALL).train()
    assert set(seen) == {0.0, 0.7, 1.0}


@pytest.mark.parametrize("settings", [{"group_size": 1}, {"model": "/no/such"}, {"task": "no-such-task-v0"}])
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        AsyncAgent(**{"task": "math-v0", "run_dir": str(tmp_path / "run"), **settings})
    assert not (tmp_path / "run").exists()


def test_the_learner_is_told_the_settings_of_the_run() -> None:
    config = TrainConfig("math-v0", lr=3e-4, seed=7)
    cpu, gpu = learner_config(config, "m", "cpu"), learner_config(config, "m", "cuda")
    assert (cpu.model, cpu.lr, cpu.seed) == ("m", 3e-4, 7)
    assert (cpu.transfer_backend, cpu.transfer_dtype, cpu.mixed_precision) == ("shm", "float32", "no")
    assert (gpu.transfer_dtype, gpu.mixed_precision) == ("bfloat16", "bf16")
