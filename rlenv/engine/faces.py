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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from rlenv.engine.base import PauseMode, UpdateReport, WeightSender
from rlenv.errors import ConfigError, EngineDeadError, EngineError
from rlenv.types import Completion, Sample

T = TypeVar("T")
NAMES_TOLD = 4  # of requests that a death left pending


class EngineFaces:
    """Sync and async faces over one event-loop thread; `in_flight` and its peak; death, a new life, an orderly end.

    After `close`, and at interpreter exit, calls that still wait fail with an EngineError that names the engine; after
    `die` with an EngineDeadError, as do later ones, until a `restart`.
    """

    def __init__(self, model: str, max_model_len: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.peak_in_flight = 0
        self._live: dict[object, str] = {}  # each request that has not come back → its caller's name for it
        self._closed = False
        self._life = _Life()
        self._restarting = asyncio.Lock()
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

    @property
    def ended(self) -> bool:
        """Whether it was closed, or has died and was not restarted."""
        return self._closed or self._life.death is not None

    def submit(self, prompt_ids: Sequence[int], sample: Sample, *, request_id: str | None = None) -> Future[Completion]:
        """Queue one request; returns at once. Cancelling the future aborts the request.

        Raises ConfigError when the prompt is empty or leaves no room in the context.
        """
        prompt = tuple(prompt_ids)
        self._check_room(prompt)
        token = object()
        future = self.start(self._counted(token, prompt, sample, request_id), live=(token, request_id or ""))
        future.add_done_callback(lambda _: self._live.pop(token, None))  # also when cancelled before it began
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

    async def restart(self, sender: WeightSender, version: int | None = None) -> UpdateReport:
        """End what is left of the engine and start it anew, with the weights of `version` brought back and proven.

        Left out, `version` is the one that served last. Requests from before are lost: they fail. Raises EngineError
        if the engine does not start and whatever `update_weights` raises; it serves nothing then.
        """
        return await asyncio.wrap_future(self._start_restart(sender, version))

    def restart_sync(self, sender: WeightSender, version: int | None = None) -> UpdateReport:
        """`restart`, waited for."""
        return _wait(self._start_restart(sender, version))

    def start(self, coroutine: Coroutine[Any, Any, T], *, live: tuple[object, str] | None = None) -> Future[T]:
        """Run `coroutine` on the engine's loop; returns at once. Cancelling the future cancels the coroutine.

        `live`, a key and a name, is counted in `in_flight`. Raises EngineError on a closed engine, EngineDeadError on
        a dead one.
        """
        with self._gate:
            if self._closed or self._life.death is not None:
                coroutine.close()
                raise self._closed_error() if self._closed else EngineDeadError(self._life.death)
            if live is not None:
                self._live[live[0]] = live[1]
                self.peak_in_flight = max(self.peak_in_flight, len(self._live))
            return asyncio.run_coroutine_threadsafe(self._named(coroutine, self._life), self._loop)

    def die(self, how: str = "died") -> None:
        """Fail every call that waits, and later ones at once, until a restart. To be called on the engine's loop."""
        with self._gate:
            if self._life.death is not None:
                return
            self._life.death = f"engine {self.model!r} {how}; {_pending(list(self._live.values()))}"
        for call in self._life.calls:
            call.cancel()
        self._died(EngineDeadError(self._life.death))

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
        except Exception:
            self._notice_death()  # while this request still counts as pending
            raise
        finally:
            self._live.pop(token, None)  # before the future wakes its waiter, who may look at `in_flight`

    async def _named(self, coroutine: Coroutine[Any, Any, T], life: _Life) -> T:
        """What `coroutine` returns or raises, unless the engine's end is the reason."""
        call = asyncio.current_task()
        assert call is not None
        call.add_done_callback(_retrieve)
        life.calls.add(call)
        try:
            if life.death is not None:
                coroutine.close()
                raise asyncio.CancelledError
            return await coroutine
        except (Exception, asyncio.CancelledError) as error:
            if self._closed and isinstance(error, asyncio.CancelledError):
                raise self._closed_error() from None
            if life is self._life:
                self._notice_death()
            if life.death is not None:
                raise EngineDeadError(life.death) from None
            raise
        finally:
            life.calls.remove(call)

    def _notice_death(self) -> None:
        if not self._closed and self._is_dead():
            self.die()

    def _start_restart(self, sender: WeightSender, version: int | None) -> Future[UpdateReport]:
        with self._gate:
            if self._closed:
                raise self._closed_error()
            return asyncio.run_coroutine_threadsafe(self._named(self._restart(sender, version), _Life()), self._loop)

    async def _restart(self, sender: WeightSender, version: int | None) -> UpdateReport:
        async with self._restarting:
            self.die("was restarted")
            await asyncio.gather(*self._life.calls, return_exceptions=True)  # they may be cleaning up
            await self._start_again()
            with self._gate:
                self._life = _Life()
            update = self._update_weights(sender, self.weight_version if version is None else version, "keep", True)
            return await asyncio.wrap_future(self.start(update))

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

    @property
    def weight_version(self) -> int:
        """The version of the weights that serve now."""
        raise NotImplementedError

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

    def _is_dead(self) -> bool:
        """Whether what the engine runs on has ended by itself."""
        raise NotImplementedError

    def _died(self, error: EngineDeadError) -> None:
        """Let go of what still waits for the engine, and of what can never be proven."""
        raise NotImplementedError

    async def _start_again(self) -> None:
        """A new engine, which serves no request before its weights are updated."""
        raise NotImplementedError

    async def _close(self) -> None:
        """Release what the engine holds; runs once, before the calls that still wait are failed."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class _Life:
    """The time from a start of the engine to its death: the calls that wait in it, and the message of its death."""

    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    death: str | None = None


class _CloseAtExit:
    """Closes the engine at interpreter exit, without keeping an engine alive that nobody holds."""

    def __init__(self, engine: EngineFaces) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        if (engine := self._engine()) is not None:
            engine.close()


def _retrieve(call: asyncio.Task[Any]) -> None:
    """What a call raised is its caller's to see. One who cancelled it does not look, and asyncio would complain."""
    if not call.cancelled():
        call.exception()


def _pending(names: Sequence[str]) -> str:
    """How many requests wait, and the first of those that have a name."""
    counted = f"{len(names)} requests were pending"
    told = list(dict.fromkeys(name for name in names if name))
    if not told:
        return counted
    return f"{counted}: {', '.join(told[:NAMES_TOLD])}{', …' if len(told) > NAMES_TOLD else ''}"


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
