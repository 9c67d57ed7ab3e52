"""Coroutines of an engine on a loop of its own go in, calls from any thread or event loop come out.

An engine inherits `EngineFaces` and writes the `_hooks` at the end of the class, as coroutines that always
run on the engine's own event-loop thread. So its state needs no lock, and callers need not share a loop.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from rlenv.engine.base import PauseMode, UpdateReport, WeightSender
from rlenv.errors import ConfigError, EngineError
from rlenv.types import Completion, Sample

T = TypeVar("T")


class EngineFaces:
    """Sync and async faces over one event-loop thread; `in_flight` and its peak; an orderly end.

    After `close`, and at interpreter exit, calls that still wait fail with an EngineError that names the engine.
    """

    def __init__(self, model: str, max_model_len: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.peak_in_flight = 0
        self._live: set[object] = set()
        self._closed = False
        self._gate = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"rlenv engine {model}", daemon=True)
        self._thread.start()
        self._at_exit = _CloseAtExit(self)
        atexit.register(self._at_exit)

    @property
    def in_flight(self) -> int:
        """How many requests were submitted and have not come back."""
        return len(self._live)

    def submit(self, prompt_ids: Sequence[int], sample: Sample, *, request_id: str | None = None) -> Future[Completion]:
        """Queue one request; returns at once. Cancelling the future aborts the request.

        Raises ConfigError when the prompt is empty or leaves no room in the context.
        """
        prompt = tuple(prompt_ids)
        self._check_room(prompt)
        token = object()
        future = self.start(self._counted(token, prompt, sample, request_id), live=token)
        future.add_done_callback(lambda _: self._live.discard(token))  # also when cancelled before it began
        return future

    async def generate(self, prompt_ids: Sequence[int], sample: Sample, *, request_id: str | None = None) -> Completion:
        """`submit`, awaited on the caller's event loop. Cancelling the await aborts the request."""
        return await asyncio.wrap_future(self.submit(prompt_ids, sample, request_id=request_id))

    def generate_sync(self, prompt_ids: Sequence[int], sample: Sample, *, request_id: str | None = None) -> Completion:
        """`submit`, waited for. An interrupt of the wait aborts the request."""
        return _wait(self.submit(prompt_ids, sample, request_id=request_id))

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Abort these requests, or all; each comes back with `finish_reason="abort"`."""
        wanted = None if request_ids is None else frozenset(request_ids)
        await asyncio.wrap_future(self.start(self._abort(wanted)))

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop scheduling; the last of several pauses decides what becomes of the requests in flight.

        Raises ConfigError when requests that a "keep" holds are to be waited for.
        """
        await asyncio.wrap_future(self.start(self._pause(_checked(mode), clear_cache)))

    def pause_sync(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """`pause`, waited for."""
        _wait(self.start(self._pause(_checked(mode), clear_cache)))

    async def resume(self) -> None:
        """Schedule again; without a pause, nothing happens."""
        await asyncio.wrap_future(self.start(self._resume()))

    def resume_sync(self) -> None:
        """`resume`, waited for."""
        _wait(self.start(self._resume()))

    async def is_paused(self) -> bool:
        """Whether new tokens are withheld."""
        return await asyncio.wrap_future(self.start(self._is_paused()))

    async def update_weights(
        self, sender: WeightSender, version: int, *, mode: PauseMode = "keep", clear_cache: bool = True
    ) -> UpdateReport:
        """pause → transfer → label → resume → prove; raises WeightUpdateError when the proof fails twice."""
        update = self._update_weights(sender, version, _checked(mode), clear_cache)
        return await asyncio.wrap_future(self.start(update))

    def update_weights_sync(
        self, sender: WeightSender, version: int, *, mode: PauseMode = "keep", clear_cache: bool = True
    ) -> UpdateReport:
        """`update_weights`, waited for."""
        return _wait(self.start(self._update_weights(sender, version, _checked(mode), clear_cache)))

    async def proven(self, labels: Iterable[str]) -> None:
        """Wait until each of these labels is proven; raises WeightUpdateError if one was refuted."""
        await asyncio.wrap_future(self.start(self._proven(frozenset(labels))))

    def start(self, coroutine: Coroutine[Any, Any, T], *, live: object | None = None) -> Future[T]:
        """Run `coroutine` on the engine's loop; returns at once. Cancelling the future cancels the coroutine.

        `live` is counted in `in_flight`. Raises EngineError on a closed engine.
        """
        with self._gate:
            if self._closed:
                coroutine.close()
                raise self._closed_error()
            if live is not None:
                self._live.add(live)
                self.peak_in_flight = max(self.peak_in_flight, len(self._live))
            return asyncio.run_coroutine_threadsafe(self._named(coroutine), self._loop)

    def close(self) -> None:
        """End the engine. Closing twice is closing once; calls that still wait fail with an EngineError."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        atexit.unregister(self._at_exit)
        if threading.current_thread() is self._thread:  # a callback of ours: the loop cannot wait for itself
            ended.add_done_callback(lambda _: self._loop.stop())
            return
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _counted(
        self, token: object, prompt: tuple[int, ...], sample: Sample, request_id: str | None
    ) -> Completion:
        try:
            return await self._generate(prompt, sample, request_id)
        finally:
            self._live.discard(token)  # before the future wakes its waiter, who may look at `in_flight`

    async def _named(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._closed:
                raise self._closed_error() from None
            raise

    async def _end(self) -> None:
        try:
            await self._close()
        finally:
            waiting = asyncio.all_tasks() - {asyncio.current_task()}
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _check_room(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise ConfigError("the prompt is empty: an engine needs at least one id to continue")
        if len(prompt) >= self.max_model_len:
            raise ConfigError(
                f"a prompt of {len(prompt)} ids leaves no room in the context of {self.max_model_len} of engine "
                f"{self.model!r}: shorten it, or start the engine with a larger max_model_len"
            )

    def _closed_error(self) -> EngineError:
        return EngineError(f"engine {self.model!r} is closed")

    async def _generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        """Sample one completion; cancelled, it leaves nothing behind in the engine."""
        raise NotImplementedError

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        raise NotImplementedError

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        raise NotImplementedError

    async def _resume(self) -> None:
        raise NotImplementedError

    async def _is_paused(self) -> bool:
        raise NotImplementedError

    async def _update_weights(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport:
        raise NotImplementedError

    async def _proven(self, labels: frozenset[str]) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        """Release what the engine holds; runs once, before the calls that still wait are failed."""
        raise NotImplementedError


class _CloseAtExit:
    """Closes the engine at interpreter exit, without keeping an engine alive that nobody holds."""

    def __init__(self, engine: EngineFaces) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        if (engine := self._engine()) is not None:
            engine.close()


def _wait(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _checked(mode: PauseMode) -> PauseMode:
    if mode not in ("abort", "wait", "keep"):
        raise ConfigError(f"no pause mode {mode!r}: choose 'abort', 'wait' or 'keep'")
    return mode
