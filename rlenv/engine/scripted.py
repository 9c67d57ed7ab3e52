"""A policy function goes in, a whole Engine with no model in it comes out, for tests and prototypes.

>>> engine = ScriptedEngine(tokenizer, lambda prompt_ids, sample: "4")
>>> engine.generate_sync(prompt_ids, Sample()).text
'4'
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlenv.engine.base import Manifest, PauseMode, Peer, UpdateReport, WeightSender
from rlenv.engine.faces import EngineFaces
from rlenv.errors import ConfigError, EngineDeadError, WeightUpdateError
from rlenv.render import Renderer
from rlenv.types import Completion, FinishReason, Sample, VersionSpan, version_of

Policy = Callable[[tuple[int, ...], Sample], str | Sequence[int]]
ATTEMPTS = 2  # a refuted update is tried once more, under a label of its own


class ScriptedEngine(EngineFaces):
    """The Engine protocol over `policy(prompt_ids, sample) -> str | ids`, one token every `delay` seconds.

    A text is tokenised and ended with the tokenizer's end token; ids are emitted as they are, and ids that run out
    without an end token or a stop string come back as cut (`"length"`). Every log-probability is `logprob`. After a
    weight update the proof takes `proof_delay` seconds.
    """

    def __init__(
        self,
        tokenizer: Any,
        policy: Policy,
        *,
        max_model_len: int = 4096,
        delay: float = 0.0,
        proof_delay: float = 0.0,
        logprob: float = -1.0,
        model: str = "scripted",
    ) -> None:
        renderer = Renderer(tokenizer)  # which may refuse the tokenizer, before a thread is started
        super().__init__(model, max_model_len)
        self.dtype = "float32"
        self.policy = policy
        self.delay = delay
        self.proof_delay = proof_delay
        self.manifests: list[Manifest] = []  # what each update said that it sent
        self.sync_calls: list[tuple[str, Any]] = []  # what senders asked of the engine, in order
        self.refuted: set[str] = set()  # labels whose proof fails; a test adds "5" before update 5
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._logprob = logprob
        self._requests: set[_Request] = set()  # by identity: ids that callers choose may repeat
        self._numbers = itertools.count()
        self._label = "0"
        self._verdicts = {"0": True}  # label → whether its proof held
        self._lost: set[str] = set()  # labels whose proof a death cut short
        self._fresh = True  # whether requests are served: not between a restart and its update
        self._paused: PauseMode | None = None
        self._updating = asyncio.Lock()
        self._change = asyncio.Event()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._tokenizer

    @property
    def weight_version(self) -> int:
        """The version of the weights that serve now."""
        return version_of(self._label)

    def kill(self) -> None:
        """Act as if the engine's process had died just now."""
        self._loop.call_soon_threadsafe(self.die)

    async def _generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        if not self._fresh:
            raise EngineDeadError(f"engine {self.model!r} was restarted and has no weights yet")
        task = asyncio.current_task()
        assert task is not None
        request = _Request(request_id or f"{self.model}-{next(self._numbers)}", task)
        self._requests.add(request)
        try:
            finish_reason = await self._decode(request, prompt, sample)
        except asyncio.CancelledError:
            if not request.aborted:
                raise
            task.uncancel()
            finish_reason = "abort"
        finally:
            self._requests.remove(request)
            self._announce()
        return Completion(
            request_id=request.id,
            prompt_ids=prompt,
            token_ids=tuple(request.token_ids),
            logprobs=(self._logprob,) * len(request.token_ids),
            spans=request.spans(),
            text=self._renderer.text(request.token_ids, sample.stop),
            finish_reason=finish_reason,
        )

    async def _decode(self, request: _Request, prompt: tuple[int, ...], sample: Sample) -> FinishReason:
        """Emit the script token by token, each under the weights that serve at that moment."""
        await self._scheduled(request)
        request.started = True
        limit = min(sample.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        for token_id in self._script(prompt, sample):
            await asyncio.sleep(self.delay)
            await self._scheduled(request)
            request.emit(token_id, self._label)
            if self._stopped(request.token_ids, sample):
                return "stop"
            if len(request.token_ids) == limit:
                return "length"
        return "length"

    def _script(self, prompt: tuple[int, ...], sample: Sample) -> list[int]:
        said = self.policy(prompt, sample)
        if isinstance(said, str):
            return [*self._renderer.answer_ids(said), self._renderer.end_id]
        return list(said)

    def _stopped(self, token_ids: list[int], sample: Sample) -> bool:
        if len(token_ids) < sample.min_tokens:
            return False
        if token_ids[-1] in self._renderer.stop_ids and not sample.ignore_eos:
            return True
        return bool(sample.stop) and self._renderer.text(token_ids, sample.stop).endswith(sample.stop)

    async def _scheduled(self, request: _Request) -> None:
        """Wait while a pause withholds tokens from this request; mode "wait" lets those under way go on."""
        while self._paused is not None and not (self._paused == "wait" and request.started):
            await self._change.wait()

    def _announce(self) -> None:
        """Wake everybody who waits for a pause, a resume, a request's end or a verdict."""
        self._change.set()
        self._change = asyncio.Event()

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        wanted = [request for request in self._requests if request_ids is None or request.id in request_ids]
        for request in wanted:
            request.aborted = True
            request.task.cancel()
        while self._requests & set(wanted):
            await self._change.wait()

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait" and self._paused == "keep":
            raise ConfigError("requests that are held by a pause cannot be waited for: resume first")
        self._paused = mode
        self._announce()
        if mode == "abort":
            await self._abort(None)
        while self._paused == "wait" and any(request.started for request in self._requests):
            await self._change.wait()

    async def _resume(self) -> None:
        self._paused = None
        self._announce()

    async def _is_paused(self) -> bool:
        return self._paused is not None

    async def _update_weights(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport:
        async with self._updating:
            for refuted in range(ATTEMPTS):
                report = await self._attempt(sender, version, mode, clear_cache, refuted)
                if self._verdicts[report.label]:
                    self._fresh = True
                    return report
        raise WeightUpdateError(
            f"engine {self.model!r} does not serve version {version}: the proof of {report.label!r} failed",
            version=version,
            what="scripted proof",
            size=0.0,
        )

    async def _attempt(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool, refuted: int
    ) -> UpdateReport:
        label = self._next_label(version)
        in_flight = self.in_flight
        times = [time.perf_counter()]
        try:
            await self._pause(mode, clear_cache)
            times.append(time.perf_counter())
            manifest = await asyncio.to_thread(sender.send, _Recorder(self.sync_calls))
            self._switch(label, stale=not clear_cache)
            self.manifests.append(manifest)
            times.append(time.perf_counter())
        finally:
            await self._resume()
        times.append(time.perf_counter())
        await asyncio.sleep(self.proof_delay)
        self._verdicts[label] = label not in self.refuted
        self._announce()
        times.append(time.perf_counter())
        pause_s, transfer_s, resume_s, prove_s = (later - earlier for earlier, later in itertools.pairwise(times))
        return UpdateReport(
            version=version,
            label=label,
            pause_s=pause_s,
            transfer_s=transfer_s,
            resume_s=resume_s,
            prove_s=prove_s,
            in_flight=in_flight,
            mismatch_mean=0.0,
            mismatch_max=0.0,
            tensors=len(manifest),
            refuted=refuted,
        )

    def _next_label(self, version: int) -> str:
        labels = itertools.chain([str(version)], (f"{version}#{attempt}" for attempt in itertools.count(2)))
        return next(label for label in labels if label not in self._verdicts.keys() | self._lost)

    def _switch(self, label: str, *, stale: bool) -> None:
        self._label = label
        for request in self._requests:
            request.stale = stale and request.started

    async def _proven(self, labels: frozenset[str]) -> None:
        for label in labels:
            while label not in self._verdicts.keys() | self._lost:
                await self._change.wait()
            if label in self._lost:
                raise EngineDeadError(f"engine {self.model!r} died before the weights {label!r} were proven")
            if not self._verdicts[label]:
                raise WeightUpdateError(
                    f"engine {self.model!r} served weights {label!r} that were refuted",
                    version=version_of(label),
                    what="scripted proof",
                    size=0.0,
                )

    def _is_dead(self) -> bool:
        return False

    def _died(self, error: EngineDeadError) -> None:
        if self._label not in self._verdicts:
            self._lost.add(self._label)

    async def _start_again(self) -> None:
        self._paused = None
        self._fresh = False

    async def _close(self) -> None:
        self._announce()


@dataclass(eq=False, slots=True)
class _Request:
    """One request under way; everything here lives on the engine's loop."""

    id: str
    task: asyncio.Task[Any]
    token_ids: list[int] = field(default_factory=list)
    weights: list[tuple[str, bool]] = field(default_factory=list)  # per token: label, stale context
    started: bool = False
    stale: bool = False
    aborted: bool = False

    def emit(self, token_id: int, label: str) -> None:
        self.token_ids.append(token_id)
        self.weights.append((label, self.stale))

    def spans(self) -> tuple[VersionSpan, ...]:
        spans = []
        end = 0
        for (label, stale), run in itertools.groupby(self.weights):
            begin, end = end, end + len(list(run))
            spans.append(VersionSpan(label, begin, end, stale))
        return tuple(spans)


class _Recorder:
    """A weight-sync client that writes down what the sender asks."""

    peer = Peer("scripted", 1, 1)

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self._calls = calls

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._calls.append(("init_weight_transfer_engine", init_info))

    def start_weight_update(self) -> None:
        self._calls.append(("start_weight_update", None))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._calls.append(("update_weights", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._calls.append(("finish_weight_update", weight_version))
