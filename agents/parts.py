"""A config goes in; a vLLM engine and a learner's process of the same weights come out, and both end with the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlenv.agents.config import TrainConfig
from rlenv.agents.learner_handle import LearnerHandle
from rlenv.agents.learner_types import LearnerConfig, Scoring
from rlenv.engine.backend import Backend
from rlenv.engine.transfer.plugin import IPC, NCCL, SHARED_MEMORY
from rlenv.errors import ConfigError
from rlenv.models import default_model

if TYPE_CHECKING:
    from rlenv.engine.settings import GPUTransport
    from rlenv.engine.vllm import VLLMEngine


@asynccontextmanager
async def open_parts(
    config: TrainConfig, *, backend: Backend | None = None, scoring: Scoring | None = None
) -> AsyncIterator[tuple[VLLMEngine, LearnerHandle]]:
    """Start both side by side; another `backend` or `scoring` than the right ones is for measurements.

    Raises ConfigError, EngineError or LearnerError when one does not start.
    """
    model, device = config.model or default_model(), _device(config)
    if device == "cpu" and not config.fp32_head:
        raise ConfigError("on a CPU everything is in fp32, the output head as well: leave --no-fp32-head out")
    backend = backend or Backend(head=config.head)
    settings = replace(learner_config(config, model, device), scoring=scoring or Scoring(head=config.head))
    learner = LearnerHandle(settings, log=Path(config.run_dir) / "learner.log")
    try:
        async with asyncio.TaskGroup() as starts:
            starting = starts.create_task(
                _start_engine(model, device, config.seed, _transport(config, device), backend)
            )
            starts.create_task(learner.ready())
    except BaseException:
        learner.close()
        raise
    engine = starting.result()
    try:
        yield engine, learner
    finally:
        await asyncio.to_thread(engine.close)
        await asyncio.to_thread(learner.close)


def learner_config(config: TrainConfig, model: str, device: Literal["cpu", "cuda"]) -> LearnerConfig:
    """The learner's part of a run's settings: fp32 on CPUs, bf16 on GPUs, and the way that weights take there."""
    cpu = device == "cpu"
    on_gpus = NCCL if _transport(config, device) == "nccl" else IPC
    return LearnerConfig(
        model=model,
        device=device,
        gpu=config.learner_gpu,
        mixed_precision="no" if cpu else "bf16",
        lr=config.lr,
        seed=config.seed,
        transfer_backend=SHARED_MEMORY if cpu else on_gpus,
        transfer_dtype="float32" if cpu else "bfloat16",
    )


def _transport(config: TrainConfig, device: str) -> GPUTransport | None:
    """How weights reach an engine on a GPU: on one GPU by handles of its memory, from another by NCCL."""
    if device == "cpu":
        return None
    return "ipc" if config.learner_gpu is None else "nccl"


def _device(config: TrainConfig) -> Literal["cpu", "cuda"]:
    if config.device != "auto":
        return config.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


async def _start_engine(
    model: str, device: str, seed: int, transport: GPUTransport | None, backend: Backend
) -> VLLMEngine:
    """Start an engine off the event loop. If nobody waits for it any more, it is closed as soon as it is there."""
    started: Future[VLLMEngine] = Future()

    def start() -> None:
        from rlenv.engine.vllm import VLLMEngine

        try:
            engine = VLLMEngine(model, device=device, seed=seed, transport=transport, backend=backend)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(engine)

    started.set_running_or_notify_cancel()
    # A daemon: the start can neither be cancelled nor hold up the exit, at which the engine closes itself.
    threading.Thread(target=start, daemon=True).start()
    try:
        return await asyncio.wrap_future(started)
    except asyncio.CancelledError:
        started.add_done_callback(_close_engine)
        raise


def _close_engine(started: Future[VLLMEngine]) -> None:
    if started.exception() is None:
        started.result().close()
