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
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlenv.bound import STEPPERS, EngineBoundEnv, Step
from rlenv.errors import ConfigError, EnvError
from rlenv.infos import batch_infos, snapshot
from rlenv.isolated import IsolatedEnv
from rlenv.spaces import Text, TextOrSample
from rlenv.types import Completion, Sample

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Batch = tuple[tuple[str, ...], Floats, Bools, Bools, dict[str, Any]]
SlotBatch = tuple[npt.NDArray[np.int64], tuple[str, ...], Floats, Bools, Bools, dict[str, Any]]
Actions = str | Sample | Sequence[str | Sample]


@dataclass(eq=False, slots=True)
class _Slot:
    """One environment and where it stands."""

    index: int
    env: gymnasium.Env[str, Any]
    observation: str = ""
    started: bool = False
    over: bool = True  # needs a reset before it can step
    errand: _Errand | None = None  # what `send` began and `recv` has not finished


@dataclass(eq=False, slots=True)
class _Errand:
    """One slot's action on its way."""

    slot: _Slot
    action: str | Sample
    ignored: bool = False  # NEXT_STEP: a reset instead of a step
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
        self.metadata = {**self.envs[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = self.envs[0].render_mode
        bound = any(isinstance(env, EngineBoundEnv) for env in self.envs)
        self.single_observation_space = Text()
        self.single_action_space = TextOrSample() if bound else Text()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        specs = [env.spec for env in self.envs]
        self.spec = specs[0] if all(spec == specs[0] for spec in specs) else None
        self._slots = [_Slot(index, env) for index, env in enumerate(self.envs)]
        self._arrived: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._finished: list[_Errand] = []
        self._apart = any(isinstance(env.unwrapped, IsolatedEnv) for env in self.envs)

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
        if busy := [slot.index for slot in self._slots if self._under_way(slot)]:
            raise ConfigError(f"slots {busy} are on their way: recv() them, or reset, before step()")
        self.send(actions)
        try:
            return _batch(self._collect(self.num_envs))
        finally:
            self._finished.clear()

    def send(self, actions: Actions, slots: Iterable[int] | None = None) -> None:
        """Begin one action in each of these slots (default: all) and return at once."""
        if self.closed:
            raise ClosedEnvironmentError("this vector environment is closed: make a new one")
        chosen = self._slots if slots is None else [self._slots[index] for index in slots]
        errands = [_Errand(slot, action) for slot, action in zip(chosen, _spread(actions, len(chosen)), strict=True)]
        for errand in errands:
            self._check(errand)
        for errand in errands:
            self._begin(errand)

    def recv(self, count: int = 1) -> SlotBatch:
        """Wait until `count` of the sent slots are done; return those that are, as (slots, *batch) in slot order.

        Everything has one row per returned slot, the infos too. Raises as `step` does; what other slots brought
        is kept for the next call.
        """
        under_way = len(self._finished) + sum(slot.errand is not None for slot in self._slots)
        if not 0 < count <= under_way:
            raise ConfigError(f"recv({count}) would wait for ever: {under_way} slots are under way")
        done = self._collect(count)
        self._finished = []
        return np.array([errand.slot.index for errand in done], dtype=np.int64), *_batch(done)

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
        self._finished = [errand for errand in self._finished if errand.slot is not slot]
        slot.observation, info = slot.env.reset(seed=seed, options=options)
        slot.started, slot.over = True, False
        return snapshot(info)

    def _under_way(self, slot: _Slot) -> bool:
        return slot.errand is not None or any(errand.slot is slot for errand in self._finished)

    def _check(self, errand: _Errand) -> None:
        slot = errand.slot
        if self._under_way(slot):
            raise ConfigError(f"slot {slot.index} is on its way: recv() it before it is sent another action")
        if slot.over and (self.autoreset_mode is not AutoresetMode.NEXT_STEP or not slot.started):
            raise ResetNeeded(f"no episode is running in slot {slot.index}: reset it, with options['reset_mask']")
        if isinstance(errand.action, Sample) and not isinstance(slot.env, EngineBoundEnv):
            raise ConfigError("these environments have no engine to sample from: give make_vec(..., engine=...)")

    def _begin(self, errand: _Errand) -> None:
        slot = errand.slot
        slot.errand, errand.ignored = errand, slot.over
        if not errand.ignored and isinstance(slot.env, EngineBoundEnv):
            try:
                errand.pending = slot.env.begin(errand.action)
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

    def _collect(self, count: int) -> list[_Errand]:
        """Finish errands as they arrive until `count` are done; then raise the first error among them, if any."""
        failed: list[Exception] = []
        while len(self._finished) + len(failed) < count:
            errand = self._arrived.get()
            slot = errand.slot
            if slot.errand is not errand:
                continue  # its episode was reset meanwhile
            if not self._apart:
                self._finish(errand)
            slot.errand = None
            if errand.result is None:
                assert errand.error is not None
                errand.error.add_note(f"in slot {slot.index}, {slot.env}")
                failed.append(errand.error)
                slot.over = True
                continue
            slot.observation, _, terminated, truncated, _ = errand.result
            slot.over = (terminated or truncated) and self.autoreset_mode is not AutoresetMode.SAME_STEP
            self._finished.append(errand)
        if failed:
            raise failed[0]
        return sorted(self._finished, key=lambda errand: errand.slot.index)

    def _finish(self, errand: _Errand) -> None:
        """Step, or reset, the errand's environment; touches nothing but the errand."""
        if errand.error is None:
            try:
                errand.result = self._outcome(errand)
            except Exception as error:
                errand.error = error

    def _outcome(self, errand: _Errand) -> Step:
        env = errand.slot.env
        if errand.ignored:
            observation, info = env.reset()
            return observation, 0.0, False, False, snapshot(info)
        observation, reward, terminated, truncated, info = _step(errand)
        info = snapshot(info)
        if (terminated or truncated) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            final = {"final_obs": observation, "final_info": info}
            observation, info = env.reset()
            info = {**final, **snapshot(info)}
        return observation, reward, terminated, truncated, info


def _step(errand: _Errand) -> Step:
    env = errand.slot.env
    try:
        if isinstance(env, EngineBoundEnv):
            return env.finish(errand.action, None if errand.pending is None else errand.pending.result())
        observation, reward, terminated, truncated, info = env.step(errand.action)
    except EnvError as error:  # its process is gone, the other slots are well
        return "", 0.0, False, True, {"failure": type(error).__name__}
    return observation, float(reward), bool(terminated), bool(truncated), info


def _batch(done: Sequence[_Errand]) -> Batch:
    results = [errand.result for errand in done if errand.result is not None]
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
