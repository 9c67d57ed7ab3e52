"""One weight update from pause to proof: a sender and a version go in, a report comes out, or one clear error.

    sender      stage · fingerprint ─ start ───────── update ────────── finish ─ · · · · · · · ─ log-probs ─┐
    engine      ···· serving ········ pause(keep) ··· load ··· label ·· resume ─ fingerprints ·· canaries ──┴─ verdict
                                      └────────── the stall ──────────┘

Nothing but the transfer itself lies between pause and resume. What was sampled meanwhile waits for the verdict.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rlenv.engine.base import Manifest, PauseMode, Peer, UpdateReport, WeightSender
from rlenv.engine.threads import in_thread
from rlenv.engine.transfer.patience import SLOWEST_BYTES_PER_S, size_of
from rlenv.engine.transfer.proof import CanaryResult, Ledger, Mismatch, WeightRows, check_canaries, check_fingerprints
from rlenv.errors import ConfigError, EngineDeadError, EngineError, WeightUpdateError

T = TypeVar("T")

TRANSFER_DEADLINE_S = 120.0
PROOF_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 10.0  # for an engine to let its requests go on; one that cannot is as good as dead


class Control(Protocol):
    """What an update asks of an engine, as coroutines on one event loop."""

    dtype: str
    proof: bool  # False: updates are believed, so that measurements can go on with what a proof would stop

    @property
    def in_flight(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    async def hold(self, mode: PauseMode, clear_cache: bool) -> None: ...
    async def release(self) -> None: ...
    async def drop_all(self) -> None: ...
    async def rpc(self, method: str, info: Any = None) -> None: ...
    async def set_label(self, label: str) -> None: ...
    async def served_label(self) -> str: ...
    async def worker_weights(self) -> list[WeightRows]: ...
    async def canaries(self) -> list[CanaryResult]: ...
    def die(self, how: str) -> None: ...


class WeightUpdater:
    """Carries out updates one at a time and keeps the ledger of proven labels."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._held: WeightRows = {}
        self._peer = Peer(secrets.token_hex(8), 0, 0)
        self._lock = asyncio.Lock()
        self.label = "0"
        self.version = 0
        self.ledger = Ledger(self.label)
        self._attempts = {self.version: 1}
        self.cleared: dict[str, bool] = {
            self.label: True
        }  # label → whether the swap to it dropped older keys and values
        self.condemned: EngineError | None = None  # why no request is served
        self._refuted = False  # whether the weights that serve were refuted

    async def update(self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool) -> UpdateReport:
        """Transfer and prove, with one full second attempt under a label of its own, on cleared caches.

        Raises ConfigError for a version older than the one that serves, the sender's own error if it failed before
        anything was loaded, and WeightUpdateError when weights are refused or refuted. If nothing was loaded the
        engine serves the old version; otherwise it serves no more, until an update succeeds.
        """
        async with self._lock:
            if version < self.version:
                raise ConfigError(f"weight version {version} is older than {self.version}, which serves now")
            first = self._attempt(version, mode, clear_cache)
            try:
                return await self._carry_out(first, sender, refuted=0)
            except WeightUpdateError as error:
                self.ledger.refute(first.label, error)
                if not first.touched:
                    raise
            self._refuted = True
            second = self._attempt(version, mode, clear_cache=True)
            try:
                return await self._carry_out(second, sender, refuted=1)
            except Exception as error:  # whatever keeps the second attempt from its end: half an update is loaded
                failure = error if isinstance(error, WeightUpdateError) else second.failed_by(error)
                self.ledger.refute(second.label, failure)
                await self._serve_no_more(failure)
                raise

    def started(self, workers: Sequence[WeightRows]) -> None:
        """The engine has started, with the weights of its model folder."""
        self._met(workers)

    def restarted(self, workers: Sequence[WeightRows]) -> None:
        """A new engine holds other weights than `version`, so it serves nothing until an update succeeds."""
        self._met(workers)
        self._refuted = False
        self.condemned = EngineDeadError(f"the engine was restarted and weights {self.version} are not back yet")

    def _met(self, workers: Sequence[WeightRows]) -> None:
        self._held = workers[0]
        self._peer = Peer(self._peer.engine, self._peer.life + 1, len(workers))

    def _attempt(self, version: int, mode: PauseMode, clear_cache: bool) -> _Attempt:
        """An attempt with a label that no other has: vLLM merges the spans of one label."""
        number = self._attempts.get(version, 0) + 1
        label = str(version) if number == 1 else f"{version}#{number}"
        self.cleared[label] = clear_cache
        self.ledger.open(label)
        return _Attempt(self._control, self._peer, self._held, version, label, mode, clear_cache, recover=self._refuted)

    async def _serve_no_more(self, error: WeightUpdateError) -> None:
        """Wrong weights, or half of them, are loaded: no request is served until an update succeeds."""
        self.condemned = error
        if self._control.ended:
            return
        size = size_of((row[2], row[3]) for row in self._held["checkpoint"])  # its worker may wait for the rest of it
        patience_s = ANSWER_DEADLINE_S + size / SLOWEST_BYTES_PER_S
        await _answered(self._control, self._control.drop_all(), patience_s)
        await _answered(self._control, self._control.release(), patience_s)

    async def _carry_out(self, attempt: _Attempt, sender: WeightSender, refuted: int) -> UpdateReport:
        """One attempt. One that is cancelled half way leaves an engine that says so, not one that stays paused."""
        try:
            return await self._transfer_and_prove(attempt, sender, refuted)
        except asyncio.CancelledError:
            cancelled = attempt.failed("the update was cancelled")
            self.ledger.refute(attempt.label, cancelled)
            if attempt.touched or attempt.recover:
                self._refuted = True
                await self._serve_no_more(cancelled)
            raise

    async def _transfer_and_prove(self, attempt: _Attempt, sender: WeightSender, refuted: int) -> UpdateReport:
        try:
            manifest = await attempt.transfer(sender, on_label=self._serve)
        finally:
            if attempt.touched:  # its label may be in use from now on
                self._attempts[attempt.version] = self._attempts.get(attempt.version, 0) + 1
        begun = time.perf_counter()
        try:
            mismatch = await asyncio.wait_for(self._prove(attempt, manifest, sender), PROOF_DEADLINE_S)
        except TimeoutError:
            raise attempt.failed(f"the proof took over {PROOF_DEADLINE_S:.0f} s") from None
        self.ledger.prove(attempt.label)
        self._refuted, self.condemned = False, None
        return UpdateReport(
            version=attempt.version,
            label=attempt.label,
            pause_s=attempt.pause_s,
            transfer_s=attempt.transfer_s,
            resume_s=attempt.resume_s,
            prove_s=time.perf_counter() - begun,
            in_flight=attempt.in_flight,
            mismatch_mean=mismatch.mean,
            mismatch_max=mismatch.max,
            tensors=len(manifest),
            refuted=refuted,
        )

    def _serve(self, attempt: _Attempt) -> None:
        self.label, self.version = attempt.label, attempt.version

    async def _prove(self, attempt: _Attempt, manifest: Manifest, sender: WeightSender) -> Mismatch:
        if not self._control.proof:
            return Mismatch(0.0, 0.0, "none")
        workers, results = await asyncio.gather(self._control.worker_weights(), self._control.canaries())
        check_fingerprints(attempt.version, manifest, workers, self._held)
        served = await self._control.served_label()
        if served != attempt.label:
            raise WeightUpdateError(
                f"weights of version {attempt.version} serve under the label {served!r} instead of {attempt.label!r}",
                version=attempt.version,
                what="label",
                size=0.0,
            )
        reference = await in_thread(sender.logprobs, [result.ids for result in results])
        return check_canaries(attempt.version, results, reference, self._control.dtype)


@dataclass
class _Attempt:
    """The client that a sender drives, for one attempt: it pauses, checks, forwards, labels and resumes."""

    control: Control
    peer: Peer
    held: WeightRows
    version: int
    label: str
    mode: PauseMode
    clear_cache: bool
    recover: bool  # whether an update before it failed with the weights touched
    touched: bool = False  # whether the engine's weights may have changed
    in_flight: int = 0
    pause_s: float = 0.0
    transfer_s: float = 0.0
    resume_s: float = 0.0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _paused: bool = False
    _finished: bool = False
    _over: bool = False  # a sender that comes late changes nothing any more
    _asked: Future[Any] | None = None  # what the sender asked last

    async def transfer(self, sender: WeightSender, on_label: Any) -> Manifest:
        """Let `sender` drive this client, within a deadline.

        The engine is resumed, unless it holds half an update: then it stays paused, for it cannot compute.
        """
        self._on_label = on_label
        try:
            manifest = await asyncio.wait_for(in_thread(sender.send, self), TRANSFER_DEADLINE_S)
        except TimeoutError:
            raise self.failed(f"the transfer took over {TRANSFER_DEADLINE_S:.0f} s") from None
        except Exception as error:
            if isinstance(error, WeightUpdateError) or not self.touched:
                raise  # what went wrong on the trainer's side alone is the trainer's to tell
            raise self.failed_by(error) from error
        finally:
            self._over = True
            if self._asked is not None:
                self._asked.cancel()  # if it is still asked, nobody waits for it any more
            if self._paused and not self.touched:
                await _answered(self.control, self.control.release(), ANSWER_DEADLINE_S)
        if not self._finished:
            raise self.failed("the sender returned without having sent anything")
        return manifest

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(self.control.rpc("init_weight_transfer_engine", {"init_info": init_info}))

    def start_weight_update(self) -> None:
        self._run(self._begin())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._run(self._load(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(self._finish())

    async def _begin(self) -> None:
        begun = time.perf_counter()
        self.in_flight = self.control.in_flight
        self._paused = True
        await self.control.hold(self.mode, self.clear_cache or self.recover)
        if self.recover:
            await self.control.rpc("rlenv_recover")
        self.pause_s = time.perf_counter() - begun
        self._begun = time.perf_counter()

    async def _load(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        check_announced(self.version, info, self.held, self.peer.workers)
        if not self.touched:
            self.touched = True
            await self.control.rpc("start_weight_update")
        await self.control.rpc("update_weights", {"update_info": info})

    async def _finish(self) -> None:
        if not self.touched:
            raise self.failed("the sender finished without having sent anything")
        await self.control.rpc("finish_weight_update")
        self.transfer_s = time.perf_counter() - self._begun
        begun = time.perf_counter()
        await self.control.set_label(self.label)
        self._on_label(self)
        await self.control.release()
        self._paused = False
        self._finished = True
        self.resume_s = time.perf_counter() - begun

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._over:
            coroutine.close()
            raise EngineError(f"the update to version {self.version} is over")
        asked = self._asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return asked.result()

    def failed_by(self, error: Exception) -> WeightUpdateError:
        return self.failed(f"{type(error).__name__}: {error}")

    def failed(self, how: str) -> WeightUpdateError:
        return WeightUpdateError(
            f"weights of version {self.version} were not delivered: {how}",
            version=self.version,
            what="transfer",
            size=0.0,
        )


async def _answered(control: Control, call: Coroutine[Any, Any, None], patience_s: float) -> None:
    """Await what lets requests go on. An engine that does not answer is declared dead, which ends this call, too."""
    try:
        await asyncio.wait_for(call, patience_s)
    except TimeoutError:
        control.die("does not answer")
        await asyncio.sleep(0)


def check_announced(version: int, info: dict[str, Any] | list[dict[str, Any]], held: WeightRows, workers: int) -> None:
    """What a sender announces is what this model takes: names and shapes, before a value is touched.

    One call announces the whole model, to all workers or, in a list, to each its own. Raises WeightUpdateError naming
    the first tensor that is missing, unknown or of another shape. A dtype other than the engine's is cast by vLLM's
    loaders, and then told by its fingerprint.
    """
    if isinstance(info, list) and len(info) != workers:
        raise WeightUpdateError(
            f"weights of version {version} were refused: a list of {len(info)} for {workers} workers, where each "
            "takes its own whole model: send them in one call",
            version=version,
            what="transfer",
            size=0.0,
        )
    for of_worker in info if isinstance(info, list) else [info]:
        _check_names(version, of_worker, held)


def _check_names(version: int, info: dict[str, Any], held: WeightRows) -> None:
    announced = {name: list(shape) for name, shape in zip(info["names"], info["shapes"], strict=True)}
    expected = {row[0]: list(row[3]) for row in held["checkpoint"]}
    for name in sorted(announced.keys() | expected.keys()):
        if announced.get(name) != expected.get(name):
            how = (
                "it is missing from the update"
                if name not in announced
                else "the engine's model has no such tensor"
                if name not in expected
                else f"its shape is {announced[name]}, the engine's model takes {expected[name]}"
            )
            raise WeightUpdateError(
                f"weights of version {version} were refused: {name}: {how}", version=version, what=name, size=0.0
            )
