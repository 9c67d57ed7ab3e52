"""The rollout engine in process, on vLLM's AsyncLLM: prompt ids go in, exact completions with weight versions come out.

All of it runs on the engine's own event-loop thread (`EngineFaces`); vLLM's core and workers are processes of
their own. Weight updates are carried out and proven by `transfer.update`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

from rlenv.engine.backend import Backend
from rlenv.engine.base import PauseMode
from rlenv.engine.process import VLLMProcesses, VLLMStart, check_plugin
from rlenv.engine.requests import canary_fields, canary_length, finish_reason, sampling_fields, version_spans
from rlenv.engine.settings import GPUTransport, RanksBackend, end_ids, engine_settings
from rlenv.engine.threads import in_thread
from rlenv.engine.transfer.plugin import EXTENSION
from rlenv.engine.transfer.proof import CanaryResult, WeightRows, canary_prompt
from rlenv.engine.transfer.update import WeightUpdater
from rlenv.engine.updating import UpdatingEngine
from rlenv.errors import ConfigError, EngineDeadError, EngineError
from rlenv.render import text_of
from rlenv.types import Completion, Sample

DEATH_CHECK_S = 0.2


class VLLMEngine(UpdatingEngine):
    """One vLLM engine for the model in folder `model`, shared by every caller in this process.

    `dtype`: float32 on a CPU, bfloat16 on a GPU unless said otherwise. `device`: "cpu", "cuda", or what vLLM was
    built for. `cpu_cores` on a CPU, "0-3" or "1,3": those to compute on, for engines side by side; vLLM takes the first
    ones by itself. `data_parallel_size` ranks, each a whole copy of the model, share the requests; their cores are
    written "0|1", and on GPUs `data_parallel_backend="ray"` lets Ray place them. `transport` on a GPU: "ipc" for a
    learner on the same one, "nccl" for one on another, "shm" through the memory of their machine. With
    `batch_invariant` no bit of a request depends on what else is in the batch (`platforms` says where). `backend` is
    right as it is: other values are for measurements. Raises ConfigError for settings that cannot work, EngineError if
    vLLM does not start.
    """

    worker_extension = EXTENSION

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        seed: int = 0,
        batch_invariant: bool = False,
        gpu_memory_utilization: float = 0.4,
        cpu_cores: str | None = None,
        data_parallel_size: int = 1,
        data_parallel_backend: RanksBackend = "mp",
        transport: GPUTransport | None = None,
        backend: Backend | None = None,
    ) -> None:
        settings = engine_settings(
            model,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            seed=seed,
            batch_invariant=batch_invariant,
            gpu_memory_utilization=gpu_memory_utilization,
            worker_extension=self.worker_extension,
            cpu_cores=cpu_cores,
            data_parallel_size=data_parallel_size,
            data_parallel_backend=data_parallel_backend,
            transport=transport,
            backend=backend,
        )
        self.device, self.dtype, self.transport = settings.device, settings.dtype, settings.transport
        check_plugin()
        super().__init__(settings.model, settings.max_model_len)
        self._settings = settings
        self._ids = itertools.count()
        self._ranks = data_parallel_size
        self._kept = False  # whether a pause holds requests in mid-generation
        self.backend = backend or Backend()
        self.salted, self.proof = self.backend.salted, self.backend.proof
        self._running: dict[str, str] = {}  # vLLM's request id → the caller's
        self._processes: VLLMProcesses | None = None
        self._starting: VLLMStart | None = None
        self._open_or_close()

    async def _open(self) -> None:
        self._updater = WeightUpdater(self)
        self._updater.started(await self._begin())
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._block = self._llm.vllm_config.cache_config.block_size
        self._end_ids = end_ids(self.model)

    async def _begin(self) -> list[WeightRows]:
        """Start vLLM's processes and look after them; returns what the worker of each rank holds."""
        self._starting = VLLMStart(self._settings.arguments, self.transport, self._settings.environment)
        self._processes = await in_thread(self._starting.run)
        self._starting = None
        self._watcher = asyncio.create_task(self._watch(self._processes))
        await self.set_label("0")
        workers = await self.worker_weights()
        if len(workers) != self._ranks:
            raise EngineError(f"{len(workers)} workers hold the weights in shards: the proof covers one worker a rank")
        return workers

    @property
    def _llm(self) -> Any:
        assert self._processes is not None
        return self._processes.llm

    @property
    def block_size(self) -> int:
        """How many ids a block of the key-value cache holds: a shorter prompt is never cached."""
        return int(self._block)

    def progress(self) -> dict[str, int]:
        """How many ids each request in flight has sampled so far, by the caller's request id."""
        states = dict(self._llm.output_processor.request_states)
        counts = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states.values()}
        return {name: counts.get(internal, 0) for internal, name in list(self._running.items())}

    # ------------------------------------------------------------------ requests

    async def _generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        if self._updater.condemned is not None:
            raise self._updater.condemned
        name = request_id or "request"
        internal = f"{name}-{next(self._ids)}"  # a name may be used again while its first request is alive
        label = self._updater.label
        self._running[internal] = name
        try:
            output = await self._run(prompt, self._parameters(prompt, sample), internal, label)
        finally:
            del self._running[internal]
        result = output.outputs[0]
        served = [(span.version, span.start, span.end) for span in result.weight_versions or []]
        return Completion(
            request_id=name,
            prompt_ids=prompt,
            token_ids=tuple(result.token_ids),
            logprobs=tuple(result.logprobs.logprobs) if result.token_ids else (),
            spans=version_spans(served, label, self._updater.cleared),
            text=text_of(self.tokenizer, result.token_ids, sample.stop),
            finish_reason=finish_reason(result.finish_reason),
        )

    def salt(self, label: str) -> str:
        """What keeps prefix-cache blocks of different weights apart."""
        return label if self.salted else "any weights"

    async def _run(
        self, prompt: tuple[int, ...], parameters: Any, internal: str, label: str, rank: int | None = None
    ) -> Any:
        """The final output of one vLLM request; the label salts the prefix cache, so no older block is met."""
        output = None
        inputs = {"prompt_token_ids": list(prompt), "cache_salt": self.salt(label)}
        async for latest in self._llm.generate(inputs, parameters, internal, data_parallel_rank=rank):
            output = latest
        assert output is not None and output.finished
        return output

    def _parameters(self, prompt: tuple[int, ...], sample: Sample) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fields = sampling_fields(sample, self.max_model_len - len(prompt), self._end_ids)
        return SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        chosen = [i for i, name in self._running.items() if request_ids is None or name in request_ids]
        known = self._llm.output_processor.external_req_ids
        while any(i in self._running and i not in known for i in chosen):  # noqa: ASYNC110 - vLLM tells no one
            await asyncio.sleep(0.001)  # it passes over ids of requests that it is still taking in
        if chosen:
            await self._llm.abort(chosen)

    # ------------------------------------------------------------------ pause and resume

    async def _is_paused(self) -> bool:
        return bool(await self._llm.is_paused())

    async def hold(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause; when paused already, a later mode still decides about the requests that were kept."""
        if mode == "wait" and self._kept:
            raise ConfigError("requests that a pause keeps cannot be waited for: resume first")
        self._kept = mode == "keep"
        await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def release(self) -> None:
        self._kept = False
        await self._llm.resume_generation()

    # ------------------------------------------------------------------ weights

    async def drop_all(self) -> None:
        await self._abort(None)

    async def rpc(self, method: str, info: Any = None) -> None:
        try:
            await self._llm.collective_rpc(method, kwargs=info)
        except Exception:
            self._notice_death()  # before the update takes it for an error of its own
            raise

    async def set_label(self, label: str) -> None:
        await self._llm.update_weight_version(label)

    async def served_label(self) -> str:
        labels = await self._llm.engine_core.call_utility_all_async("get_weight_version")
        return " and ".join(sorted(set(labels)))  # one, if the ranks agree

    async def worker_weights(self) -> list[WeightRows]:
        # A collective_rpc reaches every rank and returns what the first one answers.
        ask = self._llm.engine_core.call_utility_all_async
        ranks: list[list[WeightRows]] = await ask("collective_rpc", "rlenv_weights", None, (), None)
        return [rows for workers in ranks for rows in workers]

    async def canaries(self) -> list[CanaryResult]:
        """Those of every rank."""
        of_ranks = await asyncio.gather(*(self._canaries_of(rank) for rank in range(self._ranks)))
        return [result for results in of_ranks for result in results]

    async def _canaries_of(self, rank: int) -> list[CanaryResult]:
        """Three requests at once, two engine steps: prefill, and one token decoded beside whatever else is in flight.

        The first reads what the prefix cache held before, if anything; the second computes its whole prompt; the
        third reads the blocks that the second wrote.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        length = canary_length(self._block, self.max_model_len)
        prompt = tuple(canary_prompt(self._vocabulary, length))
        sampling = canary_fields() | {"flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        extras: list[dict[str, Any]] = [{}, {"prompt_logprobs": 0}, {}]
        before, computed, after = await asyncio.gather(*(
            self._run(
                prompt, SamplingParams(**sampling, **extra), f"canary-{next(self._ids)}", self._updater.label, rank
            )
            for extra in extras
        ))  # fmt: skip
        prefill = [computed.prompt_logprobs[i][prompt[i]].logprob for i in range(1, length)]
        return [
            CanaryResult("prefill", prompt, tuple(prefill)),
            _sampled("decode", prompt, computed),
            _sampled("cached-prefix", prompt, before),
            _sampled("cached-prefix", prompt, after),
        ]

    # ------------------------------------------------------------------ life cycle

    async def _watch(self, processes: VLLMProcesses) -> None:
        while not processes.is_dead:  # noqa: ASYNC110 - vLLM tells no one
            await asyncio.sleep(DEATH_CHECK_S)
        processes.fail_calls()
        if processes is self._processes:
            self.die()

    def _is_dead(self) -> bool:
        return self._processes is not None and self._processes.is_dead

    def _died(self, error: EngineDeadError) -> None:
        if self._processes is not None:
            self._processes.fail_calls()
        self._updater.ledger.lose(error)

    async def _start_again(self) -> None:
        if self._processes is not None:
            await in_thread(self._processes.end)
            self._processes = None
        self._kept = False
        self._updater.restarted(await self._begin())

    async def _close(self) -> None:
        if self._starting is not None:
            self._starting.give_up()
        if self._processes is not None:
            self._processes.end()


def _sampled(kind: str, prompt: tuple[int, ...], output: Any) -> CanaryResult:
    result = output.outputs[0]
    return CanaryResult(kind, prompt + tuple(result.token_ids), tuple(result.logprobs.logprobs))
