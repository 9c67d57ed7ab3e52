"""The rollout engine behind HTTP: prompt ids go to vLLM's own server, exact completions with weight versions come back.

The server runs in development mode with our worker extension, as `rlenv serve` starts it. All of the client runs on the
engine's own event-loop thread (`EngineFaces`); weight updates are carried out and proven by `transfer.update`, as in
process. A heartbeat asks which weights the server holds, so that one that hangs, died, or was restarted is noticed
while nobody calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlenv.engine.base import PauseMode
from rlenv.engine.http import CONNECT_S
from rlenv.engine.remote import Answer, RemoteVLLM, canaries
from rlenv.engine.requests import finish_reason, sampling_fields, version_spans
from rlenv.engine.settings import end_ids
from rlenv.engine.transfer.proof import CanaryResult, WeightRows
from rlenv.engine.transfer.update import WeightUpdater
from rlenv.engine.updating import UpdatingEngine
from rlenv.errors import ConfigError, EngineDeadError, EngineError, RlenvError
from rlenv.render import text_of
from rlenv.types import Completion, Sample

T = TypeVar("T")

HEARTBEAT_S = 1.0
ABORT_CHECK_S = 0.005  # between two orders to abort a request that may still be on its way
IN_TRANSIT_S = 0.1  # for answers that were given to reach us
RESTART_S = 600.0  # for somebody to start the server again


@dataclass(eq=False, slots=True)
class _Running:
    """A request under way: the caller's name for it, and whether its answer has come."""

    name: str
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class ServerEngine(UpdatingEngine):
    """The engine of the vLLM server at `url`; the weights that it holds at this moment are version 0.

    `token` is the server's API key; `model` the folder of its tokenizer, where the server's own name for its model
    says nothing on this machine. A server that leaves a question unanswered for `timeout_s` counts as dead. `close`
    leaves the server running, and `restart` waits until somebody has started it again. Raises ConfigError if the
    server cannot serve as an engine, and says why; EngineDeadError if there is none.
    """

    def __init__(
        self, url: str, *, token: str | None = None, model: str | None = None, timeout_s: float = 30.0
    ) -> None:
        self._remote = RemoteVLLM(url, token, timeout_s=timeout_s)
        self.url = self._remote.url
        super().__init__(model or self.url, 0)
        self._folder = model
        self._ids = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())  # unlike any other client's
        self._running: dict[str, _Running] = {}
        self._kept = False  # whether a pause holds requests in mid-generation
        self._held_back = False  # whether a caller's pause is on
        self._weight_calls: set[asyncio.Task[Any] | None] = set()  # they keep the engine from answering others
        self._labels: frozenset[str] = frozenset()  # what the server may say that it serves
        self._heart: asyncio.Task[None] | None = None
        self._open_or_close()

    # ------------------------------------------------------------------ connection

    async def _open(self) -> None:
        self._updater = WeightUpdater(self)
        served, self.max_model_len = await self._ask(self._remote.model())
        self.model = self._folder or served
        try:
            self._end_ids = end_ids(self.model)
        except (OSError, ValueError):
            raise ConfigError(
                f"the server at {self.url} serves {self.model!r}, whose tokenizer is not on this machine: pass model=, "
                "its folder here"
            ) from None
        if await self._is_paused():
            raise EngineError(
                f"the server at {self.url} is paused, perhaps by an update that was cut short: restart it, or POST "
                f"{self.url}/resume if its weights are whole"
            )
        await self._begin()
        self._held = await self.worker_weights()
        self._updater.started(self._held)

    async def _begin(self) -> None:
        """Learn how the server was set up, label its weights and look after it."""
        self._setup = await self._ask(self._remote.setup())
        mode, transport = self._setup.logprobs_mode, self._setup.transport
        if mode != "processed_logprobs":
            raise ConfigError(
                f"the server at {self.url} gives {mode}: start it with --logprobs-mode processed_logprobs"
            )
        if transport is None:
            raise ConfigError(f"the server at {self.url} takes no weights: start it with --weight-transfer-config")
        self.dtype, self.transport, self.proof = self._setup.dtype, transport, True
        await self.set_label("0")
        self._heart = asyncio.create_task(self._watch())

    async def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Await one call; a server that is dead by it ends every other call as well."""
        try:
            return await call
        except EngineDeadError as error:
            self.die(f"is dead: {error}")
            raise

    async def _weight_call(self, call: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        self._weight_calls.add(task)
        try:
            return await self._ask(call)
        finally:
            self._weight_calls.discard(task)

    async def _watch(self) -> None:
        """Ask for the label again and again; while weights are moved, only whether the server is there."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await (self._remote.check_health() if self._weight_calls else self._check_label())
            except RlenvError as error:
                self.die(f"is dead: {error}")
                return

    async def _check_label(self) -> None:
        before = self._labels
        served = await self._remote.label()
        if served not in before | self._labels:
            raise EngineDeadError(
                f"{self.url} serves weights labelled {served!r} instead of {self._updater.label!r}: it was restarted, "
                "or another client changes its weights"
            )

    # ------------------------------------------------------------------ requests

    async def _generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        if self._updater.condemned is not None:
            raise self._updater.condemned
        name, label = request_id or "request", self._updater.label
        internal, running = next(self._ids), _Running(name)
        fields = sampling_fields(sample, self.max_model_len - len(prompt), self._end_ids)
        self._running[internal] = running
        try:
            answer = await self._ask(self._remote.generate(name, internal, prompt, fields, label))
        finally:
            del self._running[internal]
            running.answered.set()
        self._recognise(answer)
        return Completion(
            request_id=name,
            prompt_ids=prompt,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            spans=version_spans(answer.spans, label, self._updater.cleared),
            text=text_of(self.tokenizer, answer.token_ids, sample.stop),
            finish_reason=finish_reason(answer.finish_reason),
        )

    def _recognise(self, answer: Answer) -> None:
        """Tokens of weights that no update brought are no answer."""
        for label, _, _ in answer.spans:
            if label not in self._updater.cleared:
                error = f"{self.url} sampled with weights labelled {label!r}, which no update announced"
                self.die(f"is dead: {error}")
                raise EngineDeadError(error)

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        await self._end_requests([i for i, r in self._running.items() if request_ids is None or r.name in request_ids])

    async def _end_requests(self, chosen: Sequence[str]) -> None:
        """Abort until each has come back: the server passes over ids of requests that are still on their way."""
        while left := [i for i in chosen if i in self._running]:
            await self._ask(self._remote.abort(left))
            await self._answered(left, ABORT_CHECK_S)

    async def _answered(self, requests: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until each of these requests has come back, or for so long."""
        waits = [asyncio.ensure_future(self._running[i].answered.wait()) for i in requests if i in self._running]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()

    # ------------------------------------------------------------------ pause and resume

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self.hold(mode, clear_cache)
        self._held_back = True

    async def _is_paused(self) -> bool:
        return await self._ask(self._remote.is_paused())

    async def hold(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause; when paused already, a later mode still decides about the requests that were kept."""
        if mode == "wait" and self._kept:
            raise ConfigError("requests that a pause keeps cannot be waited for: resume first")
        self._kept, self._held_back = mode == "keep", False
        in_flight = list(self._running)
        await self._ask(self._remote.pause(mode, clear_cache))
        if mode == "abort":
            await self._end_requests(in_flight)
        elif mode == "wait":
            await self._answered(in_flight, IN_TRANSIT_S)
            if late := [i for i in in_flight if i in self._running]:  # the pause overtook them
                await self.release()
                await self._answered(late)
                await self._ask(self._remote.pause(mode, clear_cache))

    async def release(self) -> None:
        self._kept = self._held_back = False
        await self._ask(self._remote.resume())

    # ------------------------------------------------------------------ weights

    async def drop_all(self) -> None:
        await self._abort(None)

    async def rpc(self, method: str, info: Any = None) -> None:
        ours = method.startswith("rlenv_")
        await self._weight_call(self._remote.extension(method) if ours else self._remote.transfer(method, info))

    async def set_label(self, label: str) -> None:
        self._labels |= {label}
        await self._ask(self._remote.set_label(label))
        self._labels = frozenset({label})

    async def served_label(self) -> str:
        return await self._ask(self._remote.label())

    async def worker_weights(self) -> list[WeightRows]:
        return await self._weight_call(self._remote.weights())

    async def canaries(self) -> list[CanaryResult]:
        async def run(prompt: Sequence[int], fields: dict[str, Any]) -> Answer:
            call = self._remote.generate("canary", next(self._ids), prompt, fields, self._updater.label)
            return await self._ask(call)

        return await canaries(run, self._setup.vocabulary, self._setup.block, self.max_model_len)

    # ------------------------------------------------------------------ life cycle

    def _is_dead(self) -> bool:
        return False  # `_ask` and the heartbeat declare a death

    def _died(self, error: EngineDeadError) -> None:
        for task in {self._heart, *self._weight_calls} - {asyncio.current_task()}:
            if task is not None:
                task.cancel()
        self._updater.ledger.lose(error)

    async def _start_again(self) -> None:
        """Wait for the server to be back, whoever starts it, and take it over, with half an update in it if need be."""
        try:
            async with asyncio.timeout(RESTART_S):
                while not await self._is_healthy():  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(HEARTBEAT_S)
        except TimeoutError:
            raise EngineError(f"no server was back at {self.url} within {RESTART_S:.0f} s") from None
        await self._begin()
        if await self._is_paused():
            await self.rpc("rlenv_recover")  # half an update cannot be read, and its model is the same
        else:
            self._held = await self.worker_weights()
        self._kept = self._held_back = False
        self._updater.restarted(self._held)

    async def _is_healthy(self) -> bool:
        try:
            await self._remote.check_health()
        except EngineError:
            return False
        return True

    async def _close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        calls = set(self._life.calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if self._held_back and self._life.death is None:
            with contextlib.suppress(EngineError):  # a server that is gone holds nobody back
                await self._remote.resume(timeout_s=CONNECT_S)
        await self._remote.close()
