"""An engine in an actor that Ray places: the driver's calls go in, what vLLM answers on another machine comes out.

    driver   requests · weight sender · updater and ledger (which outlive the actor)
       │ Ray
    actor    VLLMEngine ─ EngineCore ─ Worker                     each ends when the one before it does

vLLM's own `RayVLLMWeightSyncClient` calls the methods of an actor that is an AsyncLLM, one after the other, and ends
with a label. Here a sender is given the client of the updater, which pauses, checks what is announced against the
model before a value is touched, numbers the attempt, resumes, and has deadlines; each of its calls goes to the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rlenv.engine.base import PauseMode
from rlenv.engine.settings import context_of, model_folder
from rlenv.engine.threads import in_thread
from rlenv.engine.transfer.proof import CanaryResult, WeightRows
from rlenv.engine.transfer.update import WeightUpdater
from rlenv.engine.updating import UpdatingEngine
from rlenv.engine.vllm import VLLMEngine
from rlenv.errors import ConfigError, EngineDeadError, EngineError
from rlenv.types import Completion, Sample

START_S = 600.0  # for Ray to place the actor and vLLM to start in it
CLOSE_S = 30.0
DEATH_CHECK_S = 0.2
# A pause must not queue behind the requests that it is to hold; an actor that Ray began anew would have no vLLM.
_OURS = {"max_concurrency": 100_000, "max_restarts": 0, "max_task_retries": 0}


class RayEngine(UpdatingEngine):
    """A VLLMEngine in an actor of its own, on whichever machine of the cluster has what `actor` asks for.

    `actor`: options of the Ray actor, such as `{"num_gpus": 1}`; `settings`: those of `VLLMEngine`. Each machine needs
    rlenv and the model under the same name. `ray.init` comes first. Raises ConfigError for settings that cannot work,
    EngineError if the engine does not start.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        actor: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        **settings: Any,
    ) -> None:
        if not ray.is_initialized():
            raise ConfigError("Ray is not there: call ray.init() first, or ray.init(address='auto') on a cluster")
        folder = model_folder(model)
        super().__init__(folder, max_model_len or context_of(folder))
        self._options = {"num_cpus": 1, **(actor or {}), **_OURS}
        self._settings = {**settings, "max_model_len": self.max_model_len}
        self._actor: Any = None
        self._lost = False  # whether the actor, or vLLM in it, ended by itself
        self._open_or_close()

    def progress(self) -> dict[str, int]:
        """How many ids each request in flight has sampled so far, by the caller's request id."""
        counts: dict[str, int] = ray.get(self._actor.progress.remote())
        return counts

    async def _open(self) -> None:
        self._updater = WeightUpdater(self)
        self._updater.started(await self._begin())

    async def _begin(self) -> list[WeightRows]:
        """Place the actor, start vLLM in it and look after both; returns what its worker holds."""
        self._lost = False
        self._actor = ray.remote(**self._options)(Host).remote()
        try:
            facts = await asyncio.wait_for(self._ask("open", self.model, self._settings), START_S)
        except TimeoutError:
            self._lost = True  # nobody is there to be asked to close
            raise EngineError(f"Ray did not start {self.model!r} in {START_S:.0f} s: has it {self._options}?") from None
        self.dtype, self.transport, self.proof = facts["dtype"], facts["transport"], True
        self._watcher = asyncio.create_task(self._watch(self._actor))
        return await self.worker_weights()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the actor returns or raises. Cancelled, it is cancelled there."""
        answer = getattr(self._actor, method).remote(*arguments)
        try:
            return await asyncio.wrap_future(answer.future())
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayTaskError as error:
            self._lost |= isinstance(error.cause, EngineDeadError)
            raise error.cause from None
        except RayError as error:  # of the actor, of its machine's memory, or of where it was to be placed
            self._lost = True
            raise EngineDeadError(f"the actor of engine {self.model!r} died: {error}") from None

    # ------------------------------------------------------------------ requests, pause and resume

    async def _generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        if self._updater.condemned is not None:
            raise self._updater.condemned
        completion: Completion = await self._ask("generate", prompt, sample, request_id)
        return completion

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        await self._ask("call", "_abort", request_ids)

    async def _is_paused(self) -> bool:
        return bool(await self._ask("call", "_is_paused"))

    # ------------------------------------------------------------------ weights

    async def hold(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._ask("call", "hold", mode, clear_cache)

    async def release(self) -> None:
        await self._ask("call", "release")

    async def drop_all(self) -> None:
        await self._ask("call", "drop_all")

    async def rpc(self, method: str, info: Any = None) -> None:
        await self._ask("call", "rpc", method, info)

    async def set_label(self, label: str) -> None:
        await self._ask("call", "set_label", label)

    async def served_label(self) -> str:
        return str(await self._ask("call", "served_label"))

    async def worker_weights(self) -> list[WeightRows]:
        rows: list[WeightRows] = await self._ask("call", "worker_weights")
        return rows

    async def canaries(self) -> list[CanaryResult]:
        results: list[CanaryResult] = await self._ask("call", "canaries")
        return results

    # ------------------------------------------------------------------ life cycle

    async def _watch(self, actor: Any) -> None:
        with contextlib.suppress(RayError):
            await asyncio.wrap_future(actor.ended.remote().future())
        if actor is self._actor:
            self._lost = True
            self.die()

    def _is_dead(self) -> bool:
        return self._lost

    def _died(self, error: EngineDeadError) -> None:
        self._updater.ledger.lose(error)

    async def _start_again(self) -> None:
        await self._end_actor()
        self._updater.restarted(await self._begin())

    async def _close(self) -> None:
        await self._end_actor()

    async def _end_actor(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None or not ray.is_initialized():
            return
        if not self._lost:
            await asyncio.wait([asyncio.wrap_future(actor.close.remote().future())], timeout=CLOSE_S)
        ray.kill(actor)


class Host:
    """The actor: a VLLMEngine whose coroutines are called by name."""

    async def open(self, model: str, settings: Mapping[str, Any]) -> dict[str, str]:
        """Start vLLM; returns what the driver has to know of it."""
        self._engine = await in_thread(functools.partial(HostedEngine, model, **settings))
        return {"dtype": self._engine.dtype, "transport": self._engine.transport}

    async def generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        return await self._engine.generate(prompt, sample, request_id=request_id)

    async def call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._engine.start(getattr(self._engine, method)(*arguments)))

    async def progress(self) -> dict[str, int]:
        return self._engine.progress()

    async def ended(self) -> None:
        """Returns once vLLM has ended by itself."""
        while not self._engine.is_dead:  # noqa: ASYNC110 - vLLM tells no one
            await asyncio.sleep(DEATH_CHECK_S)

    async def close(self) -> None:
        await in_thread(self._engine.close)


class HostedEngine(VLLMEngine):
    """The engine in the actor. The updater in the driver numbers its labels, so that they go on after a restart."""

    _clears = True  # whether the pause before a label dropped older keys and values

    @property
    def is_dead(self) -> bool:
        return self._is_dead()

    async def hold(self, mode: PauseMode, clear_cache: bool) -> None:
        self._clears = clear_cache
        await super().hold(mode, clear_cache)

    async def set_label(self, label: str) -> None:
        await super().set_label(label)
        self._updater.label = label
        self._updater.cleared[label] = self._clears
