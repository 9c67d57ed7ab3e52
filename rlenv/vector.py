"""Text environments go in, one vector environment comes out whose step is a single batch to the shared engine.

`step` submits every request before it waits for any. `send` and `recv` do the same for any subset of slots, so
that fast slots need not wait for slow ones. All three of Gymnasium's autoreset modes are honoured; under
NEXT_STEP nothing is submitted for a slot whose action is ignored.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlenv.bound import STEPPERS, EngineBoundEnv, Step
from rlenv.errors import ConfigError
from rlenv.infos import batch_infos, snapshot
from rlenv.isolated import IsolatedEnv
from rlenv.spaces import Text, TextOrSample
from rlenv.types import Completion, Sample

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Batch = tuple[tuple[str, ...], Floats, Bools, Bools, dict[str, Any]]
SlotBatch = tuple[npt.NDArray[np.int64], tuple[str, ...], Floats, Bools, Bools, dict[str, Any]]
Actions = str | Sample | Sequence[str | Sample]
_SLOT = attrgetter("slot.index")


@dataclass(eq=False, slots=True)
class _Slot:
    """One environment and where it stands."""

    index: int
    env: gymnasium.Env[str, Any]
    bound: EngineBoundEnv | None  # the same, when it can sample
    observation: str = ""
    started: bool = False
    over: bool = True  # needs a reset before it can step
    errand: _Errand | None = None  # what `send` began and `recv` has not finished


@dataclass(eq=False, slots=True)
class _Errand:
    """One slot's action on its way."""

    slot: _Slot
    action: str | Sample
    ignored: bool  # NEXT_STEP: a reset instead of a step
    pending: Future[Completion] | None = None
    result: Step | None = None
    error: Exception | None = None


class TextVectorEnv(gymnasium.vector.VectorEnv[tuple[str, ...], Any, npt.NDArray[Any]]):
    """Steps `num_envs` text environments, whose tasks may differ, in one batch.

    Observations are a tuple of str in slot order; rewards, terminations and truncations arrays [num_envs];
    infos hold an array per key and a mask `_key` of the slots that have it, as Gymnasium's do. An action for
    all slots is one `str` or `Sample`; a sequence gives one to each. Not safe for several threads at once.
    """

    def __init__(
        self, envs: Sequence[gymnasium.Env[str, Any]], *, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    ) -> None:
        self.envs = [*envs]
        self.num_envs = len(self.envs)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        bound = [env if isinstance(env, EngineBoundEnv) else None for env in self.envs]
        self._apart = any(isinstance(env.unwrapped, IsolatedEnv) for env in self.envs)
        self._waits = self._apart or any(one is not None for one in bound)
        self._same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        self.metadata = {**self.envs[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = self.envs[0].render_mode
        self.single_observation_space = Text()
        self.single_action_space = TextOrSample() if any(one is not None for one in bound) else Text()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        specs = [env.spec for env in self.envs]
        self.spec = specs[0] if all(spec == specs[0] for spec in specs) else None
        self._slots = [_Slot(index, env, one) for index, (env, one) in enumerate(zip(self.envs, bound, strict=True))]
        self._arrived: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._done: list[_Errand] = []
        self._failed: list[_Errand] = []

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Start episodes in all slots, or in those of `options["reset_mask"]` (a bool array [num_envs]).

        `seed=s` gives slot i the seed s + i; a sequence gives each slot its own, where equal seeds mean equal
        tasks. Other options go to every environment. Requests in flight of these slots are aborted.
        """
        mask, rest = self._split_mask(options)
        seeds = self._seeds(seed)
        infos = {slot.index: self._start(slot, seeds[slot.index], rest) for slot in self._slots if mask[slot.index]}
        return tuple(slot.observation for slot in self._slots), batch_infos(infos, self.num_envs)

    def step(self, actions: Actions) -> Batch:
        """One action in every slot.

        Raises what an environment or the engine raised, after the other slots are done; the slot that failed
        needs a reset. Raises ResetNeeded under DISABLED when an episode is over.
        """
        if (self._waits or self._done) and (busy := [slot.index for slot in self._slots if self._under_way(slot)]):
            raise ConfigError(f"slots {busy} are on their way: recv() them, or reset, before step()")
        each = self._checked(self._slots, actions)
        if not self._waits:
            return self._step_here(each)
        for slot, action in zip(self._slots, each, strict=True):
            self._begin(slot, action)
        try:
            self._collect(self.num_envs)
            return _batch([errand.result for errand in sorted(self._done, key=_SLOT) if errand.result])
        finally:
            self._done.clear()

    def send(self, actions: Actions, slots: Iterable[int] | None = None) -> None:
        """Begin one action in each of these slots (default: all) and return at once."""
        chosen = self._slots if slots is None else [self._slots[index] for index in slots]
        for slot, action in zip(chosen, self._checked(chosen, actions), strict=True):
            self._begin(slot, action)

    def recv(self, count: int = 1) -> SlotBatch:
        """Wait until `count` of the sent slots are done; return those that are, as (slots, *batch) in slot order.

        Everything has one row per returned slot, the infos too. Raises as `step` does; what other slots brought
        is kept for the next call.
        """
        under_way = len(self._done) + len(self._failed) + sum(slot.errand is not None for slot in self._slots)
        if not 0 < count <= under_way:
            raise ConfigError(f"recv({count}) would wait for ever: {under_way} slots are under way")
        self._collect(count)
        done, self._done = sorted(self._done, key=_SLOT), []
        results = [errand.result for errand in done if errand.result]
        return np.array([errand.slot.index for errand in done], dtype=np.int64), *_batch(results)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """A method of every environment, called; in slot order."""
        return tuple(method(*args, **kwargs) for method in self.get_attr(name))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment, in slot order."""
        return tuple(env.get_wrapper_attr(name) for env in self.envs)

    def render(self) -> tuple[Any, ...]:
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Abort what is in flight and close the environments; the engine is shared and stays."""
        for slot in self._slots:
            slot.errand = None
            slot.env.close()

    def _split_mask(self, options: dict[str, Any] | None) -> tuple[Bools, dict[str, Any] | None]:
        """The slots to reset, and the options of the environments; the caller's dict stays as it is."""
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, dtype=np.bool_), options
        mask = np.asarray(options["reset_mask"])
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ConfigError(f"reset_mask must be a bool array [{self.num_envs}] with at least one True, not {mask!r}")
        return mask, {name: value for name, value in options.items() if name != "reset_mask"}

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None or isinstance(seed, int | np.integer):
            return [None if seed is None else int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigError(f"{len(seed)} seeds for {self.num_envs} environments: give one for each")
        return seed

    def _start(self, slot: _Slot, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        slot.errand = None
        self._done = [errand for errand in self._done if errand.slot is not slot]
        self._failed = [errand for errand in self._failed if errand.slot is not slot]
        slot.observation, info = slot.env.reset(seed=seed, options=options)
        slot.started, slot.over = True, False
        return info

    def _under_way(self, slot: _Slot) -> bool:
        return slot.errand is not None or any(errand.slot is slot for errand in self._done)

    def _checked(self, slots: Sequence[_Slot], actions: Actions) -> Sequence[str | Sample]:
        """One action for each slot, when all of them can be taken."""
        if self.closed:
            raise ClosedEnvironmentError("this vector environment is closed: make a new one")
        each = _spread(actions, len(slots))
        for slot, action in zip(slots, each, strict=True):
            if slot.over or slot.errand is not None or self._done or type(action) is not str:
                self._check(slot, action)
        return each

    def _check(self, slot: _Slot, action: str | Sample) -> None:
        if self._under_way(slot):
            raise ConfigError(f"slot {slot.index} is on its way: recv() it before it is sent another action")
        if slot.over and (self.autoreset_mode is not AutoresetMode.NEXT_STEP or not slot.started):
            raise ResetNeeded(f"no episode is running in slot {slot.index}: reset it, with options['reset_mask']")
        if slot.bound is None and isinstance(action, Sample):
            raise ConfigError("these environments have no engine to sample from: give make_vec(..., engine=...)")

    def _step_here(self, actions: Sequence[str | Sample]) -> Batch:
        """`step` of environments that have nothing to wait for: one after the other, without errands."""
        results: list[Step] = []
        failed: list[Exception] = []
        for slot, action in zip(self._slots, actions, strict=True):
            try:
                result: Any = _opened(slot.env) if slot.over else slot.env.step(action)
                slot.over = False
                if result[2] or result[3]:
                    slot.over = not self._same_step
                    result = _restarted(slot.env, result) if self._same_step else result
                slot.observation = result[0]
                results.append(result)
            except Exception as error:
                slot.over = True
                failed.append(_located(error, slot))
        if failed:
            raise failed[0]
        return _batch(results)

    def _begin(self, slot: _Slot, action: str | Sample) -> None:
        errand = slot.errand = _Errand(slot, action, slot.over)
        if slot.bound is not None and not errand.ignored:
            try:
                errand.pending = slot.bound.begin(action)
            except Exception as error:  # raised by recv, so that the other slots are begun
                errand.error = error
        if errand.pending is None:
            self._arrive(errand)
        else:
            errand.pending.add_done_callback(lambda _: self._arrive(errand))

    def _arrive(self, errand: _Errand) -> None:
        """Environments that run in processes step side by side, in threads that wait; others in the caller's thread."""
        if self._apart:
            STEPPERS.submit(self._finish, errand).add_done_callback(lambda _: self._arrived.put(errand))
        else:
            self._arrived.put(errand)

    def _collect(self, count: int) -> None:
        """Settle errands as they arrive until `count` are done; raise the first error among them, if there is one."""
        while len(self._done) + len(self._failed) < count:
            self._settle(self._arrived.get())
        failed, self._failed = self._failed, []
        if failed:
            assert failed[0].error is not None
            raise _located(failed[0].error, failed[0].slot)

    def _settle(self, errand: _Errand) -> None:
        slot = errand.slot
        if slot.errand is not errand:
            return  # its episode was reset meanwhile
        if not self._apart:
            self._finish(errand)
        slot.errand = None
        if errand.result is None:
            slot.over = True
            self._failed.append(errand)
            return
        slot.observation, _, terminated, truncated, _ = errand.result
        slot.over = bool(terminated or truncated) and not self._same_step
        self._done.append(errand)

    def _finish(self, errand: _Errand) -> None:
        """Step, or reset, the errand's environment; touches nothing but the errand."""
        slot = errand.slot
        try:
            if errand.error is not None:
                raise errand.error
            if errand.ignored:
                errand.result = _opened(slot.env)
                return
            if slot.bound is None:
                result: Any = slot.env.step(errand.action)
            else:
                result = slot.bound.finish(errand.action, errand.pending.result() if errand.pending else None)
            over = result[2] or result[3]
            errand.result = _restarted(slot.env, result) if over and self._same_step else result
        except Exception as error:
            errand.error = error


def _opened(env: gymnasium.Env[str, Any]) -> Step:
    """NEXT_STEP: the next episode's first observation, as a step that ignored its action."""
    observation, info = env.reset()
    return observation, 0.0, False, False, info


def _restarted(env: gymnasium.Env[str, Any], step: Step) -> Step:
    """SAME_STEP: the last step's verdict, with the next episode's first observation."""
    final, reward, terminated, truncated, info = step
    kept = {"final_obs": final, "final_info": snapshot(info)}
    observation, info = env.reset()
    return observation, reward, terminated, truncated, {**kept, **info}


def _located(error: Exception, slot: _Slot) -> Exception:
    error.add_note(f"in slot {slot.index}, {slot.env}")
    return error


def _batch(results: Sequence[Step]) -> Batch:
    observations, rewards, terminations, truncations, infos = zip(*results, strict=True)
    return (
        observations,
        np.array(rewards, dtype=np.float64),
        np.array(terminations, dtype=np.bool_),
        np.array(truncations, dtype=np.bool_),
        batch_infos(dict(enumerate(infos)), len(results)),
    )


def _spread(actions: Actions, count: int) -> Sequence[str | Sample]:
    if isinstance(actions, str | Sample):
        return [actions] * count
    if len(actions) != count:
        raise ConfigError(f"{len(actions)} actions for {count} slots: give one for each, or one for all")
    return actions
