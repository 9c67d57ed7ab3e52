"""The real engine's life: it is cancelled, starved, trained on, killed, restarted and closed, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.state import AcceleratorState

import rlenv
from benchmarks.faults import FaultyEngine, perturb
from rlenv.agents import learner as agents
from rlenv.agents.advantages import score
from rlenv.agents.config import TrainConfig
from rlenv.agents.learner_types import LearnerConfig, StepMetrics
from rlenv.agents.loop import TrainLoop
from rlenv.agents.packing import Batch, pack
from rlenv.agents.sampler import Sampler
from rlenv.agents.tally import StepRow
from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.process import VLLMProcesses
from rlenv.engine.transfer import update
from rlenv.engine.transfer.digest import tensor_digest
from rlenv.engine.transfer.plugin import NCCL
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.vllm import VLLMEngine
from rlenv.errors import ConfigError, EngineDeadError, EngineError, LearnerError, WeightUpdateError
from rlenv.models import default_model
from rlenv.rollout import EnvPool, rollout_group
from rlenv.types import Group, Sample
from tests.agents.fakes import FakeLearner
from tests.agents.rows import group, trajectory

pytestmark = pytest.mark.engine

PROMPT = [9, 8, 7]
LONG = Sample(max_tokens=240, ignore_eos=True)
GREEDY = Sample(temperature=0.0, max_tokens=32, ignore_eos=True)
NOTICE_S = 5.0
STEPS, GROUPS = 4, 2


class Learner(ModelSender):
    """A learner of the shipped model; `hook` runs in `send`, between the start of an update and its weights."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
        super().__init__(model, backend="shm")
        self.hook: Any = lambda: None

    def send(self, client: WeightSyncClient) -> Manifest:
        return super().send(_Hooked(client, self.hook))


class _Hooked:
    """A client that calls `hook` before the weights go over."""

    def __init__(self, client: WeightSyncClient, hook: Any) -> None:
        self._client, self._hook = client, hook
        self.peer = client.peer
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update = client.start_weight_update
        self.finish_weight_update = client.finish_weight_update

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._hook()
        self._client.update_weights(update_info)


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner()


@pytest.fixture(scope="module")
def mortal() -> Iterator[VLLMEngine]:
    """An engine of this module's own, which the tests that follow kill, revive and close, in their order."""
    with VLLMEngine(default_model(), device="cpu", max_model_len=256) as engine:
        yield engine


def test_cancelled_and_aborted_requests_leave_nothing_behind(vllm_engine: FaultyEngine) -> None:
    async def cancel(count: int) -> None:
        waiting = [asyncio.create_task(vllm_engine.generate(PROMPT, LONG)) for _ in range(count)]
        await asyncio.sleep(0.1)
        for task in waiting[::2]:
            task.cancel()
        await vllm_engine.abort()
        await asyncio.gather(*waiting, return_exceptions=True)

    for _ in range(4):
        asyncio.run(cancel(50))
    before = _memory(vllm_engine)
    for _ in range(4):
        asyncio.run(cancel(50))
    # An answer comes between two steps of the scheduler, so a request that was left behind would be seen 240 times.
    assert (0, 0, 0, False) in [_left(vllm_engine) for _ in range(10)]
    assert _memory(vllm_engine) - before < 8 * 2**20


def test_a_sender_that_hangs_is_given_up_and_the_old_weights_serve_on(
    vllm_engine: FaultyEngine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "TRANSFER_DEADLINE_S", 1.0)
    version = vllm_engine.weight_version
    greedy = vllm_engine.generate_sync(PROMPT, GREEDY).token_ids
    released, late = threading.Event(), Future[None]()

    class Hanging:
        logprobs = learner.logprobs

        def send(self, client: WeightSyncClient) -> Manifest:
            client.start_weight_update()
            released.wait(60)
            try:
                client.update_weights({"names": [], "shapes": []})
            except Exception as error:
                late.set_exception(error)
            return {}

    flying = vllm_engine.submit(PROMPT, LONG)
    with pytest.raises(WeightUpdateError, match="took over 1 s"):
        vllm_engine.update_weights_sync(Hanging(), version + 1)
    released.set()
    with pytest.raises(EngineError, match="is over"):
        late.result(5)
    assert flying.result(30).finish_reason == "length"
    assert not asyncio.run(vllm_engine.is_paused())
    completion = vllm_engine.generate_sync(PROMPT, GREEDY)
    assert (completion.token_ids, vllm_engine.weight_version) == (greedy, version)


def test_a_transfer_that_cannot_work_here_is_refused_while_the_engine_goes_on(
    vllm_engine: FaultyEngine, learner: Learner
) -> None:
    version, flying = vllm_engine.weight_version, vllm_engine.submit(PROMPT, LONG)
    with pytest.raises(ConfigError, match="NCCL cannot be used"):
        vllm_engine.update_weights_sync(ModelSender(learner.model, backend=NCCL), version + 1)
    assert (vllm_engine.weight_version, asyncio.run(vllm_engine.is_paused())) == (version, False)
    assert flying.result(30).finish_reason == "length"


@pytest.fixture
def accelerator() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_gradient_that_is_not_finite_reaches_neither_the_engine_nor_a_checkpoint(
    accelerator: None, vllm_engine: FaultyEngine, tmp_path: Path
) -> None:
    trained = agents.Learner(LearnerConfig(default_model(), lr=1e-4))
    sender = ModelSender(trained.model, backend=vllm_engine.transport)
    batch = pack(score([group(trajectory(reward=1.0), trajectory(reward=0.0))]), version=0)
    first = vllm_engine.weight_version + 1
    for version in range(2):
        trained.step(replace(batch, version=version))
        vllm_engine.update_weights_sync(sender, first + version)
    proven = {name: tensor_digest(parameter).value for name, parameter in trained.model.named_parameters()}
    next(trained.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(LearnerError, match="version 3: the gradient"):
        trained.step(replace(batch, version=2))
    trained.save(tmp_path / "model")
    saved = dict(type(trained.model).from_pretrained(tmp_path / "model", dtype="float32").named_parameters())
    assert {name: tensor_digest(parameter).value for name, parameter in saved.items()} == proven
    [held] = vllm_engine.start(vllm_engine.worker_weights()).result(30)
    assert {row[0]: row[4] for row in held["checkpoint"]} == proven
    assert (vllm_engine.weight_version, trained.version) == (first + 1, 2)


class Trainee(FakeLearner):
    """A learner whose steps begin when the next batch may be sampled, and end while that batch is being sampled."""

    def __init__(self, learner: Learner, engine: VLLMEngine) -> None:
        super().__init__()
        self.send, self.logprobs = learner.send, learner.logprobs
        self._model, self._engine = learner.model, engine
        self.begun = [asyncio.Event() for _ in range(STEPS)]  # whether groups of a batch may start
        self.begun[0].set()

    async def step(self, batch: Batch) -> StepMetrics:
        if batch.version + 1 < STEPS:
            self.begun[batch.version + 1].set()
            while not any(self._engine.progress().values()):  # noqa: ASYNC110 - an engine tells no one
                await asyncio.sleep(0.002)
        perturb(self._model, seed=batch.version, size=1e-3)
        return await super().step(batch)


def test_a_training_run_swaps_weights_in_mid_generation_at_every_update(mortal: VLLMEngine, learner: Learner) -> None:
    groups: dict[int, Group] = {}
    rows: list[StepRow] = []

    async def run() -> dict[str, Any]:
        trainee, pool = Trainee(learner, mortal), EnvPool(lambda: rlenv.make("math-v0", engine=mortal))
        whole_context = Sampler(Sample(ignore_eos=True))

        async def roll(id: int, seed: int) -> Group:
            await trainee.begun[id // GROUPS].wait()
            groups[id] = await rollout_group(pool, whole_context, id=id, seed=seed, group_size=4)
            return groups[id]

        config = TrainConfig("math-v0", steps=STEPS, groups_per_step=GROUPS, group_size=4)
        loop = TrainLoop(mortal, trainee, roll, config, rows.append)
        with contextlib.closing(pool):
            await asyncio.wait_for(loop.run(), 120)
        return loop.tally.summary()

    summary = asyncio.run(run())
    assert [row.in_flight > 0 for row in rows] == [True] * (STEPS - 1) + [False]  # no batch follows the last
    assert (summary["weight_updates_mid_generation"], summary["staleness_max"]) == (STEPS - 1, 1)
    assert summary["canary_failures"] == 0 and 0 < summary["mismatch_max_abs"] <= 1e-4
    for id in range(GROUPS, STEPS * GROUPS):
        swap = {str(id // GROUPS - 1), str(id // GROUPS)}
        assert any(row.labels == swap for row in groups[id].trajectories), groups[id]


def test_death_of_the_core_is_noticed_in_seconds_and_a_restart_clears_it_away(
    mortal: VLLMEngine, learner: Learner
) -> None:
    requests = [mortal.submit(PROMPT, LONG) for _ in range(16)]
    waiting = mortal.start(mortal._pause("wait", True))
    former = _processes(mortal)
    assert _remains(former)
    _kill(mortal, "EngineCore")
    _assert_all_die([*requests, waiting], pending=16)
    _assert_dead(mortal)

    again = f"{mortal.weight_version}#2"
    assert mortal.restart_sync(learner).label == again
    assert not _remains(former)
    assert mortal.generate_sync(PROMPT, GREEDY).labels == {again}


def test_a_death_in_an_update_fails_every_call_and_a_restart_brings_its_version_back(
    mortal: VLLMEngine, learner: Learner
) -> None:
    version = mortal.weight_version + 1
    perturb(learner.model, seed=1, size=3e-2)
    proven = mortal.update_weights_sync(learner, version).label
    perturb(learner.model, seed=2, size=3e-2)
    requests = [mortal.submit(PROMPT, LONG) for _ in range(16)]
    learner.hook = lambda: _kill(mortal, "Worker")
    updating = mortal.start(mortal._update_weights(learner, version + 1, "keep", True))
    waiter = mortal.start(mortal._proven(frozenset({f"{version + 1}"})))
    _assert_all_die([*requests, updating, waiter], pending=16)
    _assert_dead(mortal)
    former = _processes(mortal)

    learner.hook = lambda: None
    report = mortal.restart_sync(learner, version + 1)
    assert not _remains(former)
    assert (report.version, mortal.weight_version, mortal.in_flight) == (version + 1, version + 1, 0)
    assert report.label in (f"{version + 1}", f"{version + 1}#2") and report.mismatch_max <= 1e-4
    completion = mortal.generate_sync(PROMPT, GREEDY)
    assert completion.labels == {report.label}
    assert _greedy(learner, completion.prompt_ids) == completion.token_ids
    asyncio.run(mortal.proven([report.label, proven]))  # rows of the former life that were proven stay good
    assert mortal.update_weights_sync(learner, version + 2).label == f"{version + 2}"


def test_close_fails_what_waits_and_leaves_nothing(mortal: VLLMEngine) -> None:
    requests = [mortal.submit(PROMPT, LONG) for _ in range(16)]
    while not any(mortal.progress().values()):
        time.sleep(0.01)
    processes = _processes(mortal)
    mortal.close()
    for call in (*requests, mortal):
        with pytest.raises(EngineError, match=f"engine '{mortal.model}' is closed") as error:
            call.submit(PROMPT, GREEDY) if call is mortal else call.result(0)
        assert not isinstance(error.value, EngineDeadError)
    assert mortal.in_flight == 0 and not _remains(processes)
    mortal.close()


def _kill(engine: VLLMEngine, name: str) -> None:
    core, worker = _processes(engine).vital
    os.kill({"EngineCore": core, "Worker": worker}[name].pid, signal.SIGKILL)


def _processes(engine: VLLMEngine) -> VLLMProcesses:
    assert engine._processes is not None
    return engine._processes


def _remains(processes: VLLMProcesses) -> list[object]:
    """What is left of an engine: processes, sockets, shared memory."""
    assert len(processes.vital) == 2 and processes.shared
    files = [Path(processes.sockets), *(Path("/dev/shm") / name for name in processes.shared)]
    return [*filter(_runs, processes.family), *filter(Path.exists, files)]


def _assert_all_die(calls: Sequence[Future[Any]], pending: int) -> None:
    began = time.monotonic()
    for call in calls:
        with pytest.raises(EngineDeadError, match=f"engine '.*' died; {pending} requests were pending"):
            call.result(30)
    assert time.monotonic() - began < NOTICE_S


def _assert_dead(engine: VLLMEngine) -> None:
    began = time.monotonic()
    for call in (lambda: engine.submit(PROMPT, GREEDY), engine.resume_sync, lambda: asyncio.run(engine.proven(["0"]))):
        with pytest.raises(EngineDeadError):
            call()
    assert time.monotonic() - began < 0.5 and engine.in_flight == 0


def _left(engine: VLLMEngine) -> tuple[int, int, int, bool]:
    """In flight, known to the output processor, running by our books, and whether the scheduler has any work."""
    work = engine.start(engine._llm.engine_core.call_utility_async("has_work")).result(10)
    states = engine._llm.output_processor.request_states
    return engine.in_flight, len(states), len(engine._running), work


def _memory(engine: VLLMEngine) -> int:
    return sum(process.memory_info().rss for process in (*_processes(engine).family, psutil.Process()))


def _greedy(learner: Learner, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What the learner's own model would say."""
    import torch

    ids = torch.tensor([list(prompt)])
    said = learner.model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None)
    return tuple(said[0, len(prompt) :].tolist())


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
