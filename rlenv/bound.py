"""An environment and the shared engine go in, an environment comes out that can be asked to sample its own action.

`step(Sample(...))` continues the transcript on the engine and steps the inner environment on the text;
`step("text")` passes through. Both faces, `step` and `astep`, and the vector environment stand on one split:
`begin` submits and returns at once, `finish` steps the inner environment.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import gymnasium

from rlenv.engine.base import Engine
from rlenv.errors import AbortedError, ConfigError
from rlenv.render import Renderer
from rlenv.spaces import Text, TextOrSample
from rlenv.types import Completion, Message, Sample

Step = tuple[str, float, bool, bool, dict[str, Any]]
T = TypeVar("T")

# Where environments step that must not block their caller; wide, so that slow ones do not hold up the others.
STEPPERS = ThreadPoolExecutor(max_workers=256, thread_name_prefix="rlenv env")


class EngineBoundEnv(gymnasium.Wrapper[str, Any, str, str]):
    """Action: `str | Sample`. After a `Sample`, `info["completion"]` is the exact Completion.

    The transcript is kept as exact ids: the prompt of turn n + 1 is the prompt of turn n, what was sampled on
    it, and the rendered text of the environment. When the next prompt no longer fits the engine's context, the
    episode is `truncated` with `info["truncated_by"] = "context"`, and what was earned stays.

    An episode that has no verdict names the cause in `info["failure"]`: a first prompt that does not fit
    ("prompt_too_long", told by `reset`, and by `step` when it is asked to sample), or an isolated environment
    that hung or died ("timeout", "died"). Its last step is truncated and worth nothing.

    The engine is shared: never closed, copied or pickled with the environment, nor part of its spec.
    """

    def __init__(
        self,
        env: gymnasium.Env[str, str],
        engine: Engine,
        *,
        system: str | None = None,
        renderer: Renderer | None = None,
    ) -> None:
        super().__init__(env)
        _check_text(env)
        self.engine = engine
        self.action_space = TextOrSample()
        self._renderer = renderer or Renderer(engine.tokenizer)
        self._system = system
        self._messages: list[Message] = []
        self._ids: list[int] = []
        self._pending: Future[Completion] | None = None
        self._failure = ""  # why this episode cannot be sampled
        self._name = ""  # of this episode's requests, for whoever has to say which were lost
        self._cached_spec = env.spec  # what can be made again: without this wrapper and its engine

    @property
    def messages(self) -> tuple[Message, ...]:
        """The transcript of this episode so far."""
        return tuple(self._messages)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The exact ids of the transcript: the next turn's prompt, or the whole row once the episode is over."""
        return tuple(self._ids)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._cancel()
        observation, info = self.env.reset(seed=seed, options=options)
        opening: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._messages = [*opening, {"role": "user", "content": observation}]
        self._ids = self._renderer.start(self._messages)
        task = self.spec.id if self.spec else type(self.unwrapped).__name__
        self._name = task if seed is None else f"{task} seed {seed}"
        self._failure = info.get("failure", "" if self._fits() else "prompt_too_long")
        return observation, {**info, "failure": self._failure} if self._failure else info

    def step(self, action: str | Sample) -> Step:
        """Raises AbortedError when the engine aborted the request: what it had sampled is no answer."""
        pending = self.begin(action)
        try:
            completion = None if pending is None else pending.result()
        except BaseException:
            self._cancel()
            raise
        return self.finish(action, completion)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """`reset`, off the event loop."""
        return await _off_loop(lambda: self.reset(seed=seed, options=options))

    async def astep(self, action: str | Sample) -> Step:
        """`step`, awaited; the inner environment steps off the event loop. Cancelling it aborts the request."""
        pending = self.begin(action)
        completion: Completion | None = None
        if pending is not None:
            completion = await asyncio.wrap_future(pending)
        return await _off_loop(lambda: self.finish(action, completion))

    def begin(self, action: str | Sample) -> Future[Completion] | None:
        """Submit what the action asks for and return at once; None when there is nothing to wait for."""
        self._cancel()
        if isinstance(action, Sample) and not self._failure:
            self._pending = self.engine.submit(self._ids, action, request_id=self._name)
        return self._pending

    def finish(self, action: str | Sample, completion: Completion | None) -> Step:
        """Step the inner environment on what `begin(action)` brought.

        Raises CancelledError for the completion of an episode that was reset meanwhile.
        """
        if isinstance(action, str):
            return self._advance(action, action)
        if completion is None:
            return "", 0.0, False, True, {"failure": self._failure}
        if self._pending is None or not self._pending.done() or self._pending.result() is not completion:
            raise CancelledError(f"request {completion.request_id} belongs to an episode that was reset")
        self._pending = None
        if completion.finish_reason == "abort":
            raise AbortedError(f"request {completion.request_id} was aborted after {len(completion.token_ids)} ids")
        observation, reward, terminated, truncated, info = self._advance(completion.text, completion)
        return observation, reward, terminated, truncated, {**info, "completion": completion}

    def close(self) -> None:
        self._cancel()
        super().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineBoundEnv:
        twin = EngineBoundEnv(copy.deepcopy(self.env, memo), self.engine, system=self._system, renderer=self._renderer)
        twin._messages, twin._ids = [*self._messages], [*self._ids]
        twin._failure, twin._name = self._failure, self._name
        return twin

    def __getstate__(self) -> NoReturn:
        raise ConfigError("a live engine cannot be pickled: send env.spec, and make the environment where it is to run")

    def _advance(self, text: str, answer: str | Completion) -> Step:
        self._messages.append({"role": "assistant", "content": text})  # first: should the step raise, it is this answer
        observation, reward, terminated, truncated, info = self.env.step(text)
        over = bool(terminated or truncated)
        self._append(answer, observation, over)
        if not over and not self._fits():
            truncated, info = True, {**info, "truncated_by": "context"}
        return observation, float(reward), bool(terminated), bool(truncated), info

    def _append(self, answer: str | Completion, observation: str, over: bool) -> None:
        """Grow the transcript; a finished one gets no further prompt, so it ends with what was sampled."""
        said: list[Message] = [] if over and not observation else [{"role": "user", "content": observation}]
        self._messages += said
        if not over:
            self._ids = self._renderer.extend(self._ids, answer, said)
        elif not isinstance(answer, str):
            self._ids = [*self._ids, *answer.token_ids]

    def _fits(self) -> bool:
        return len(self._ids) < self.engine.max_model_len

    def _cancel(self) -> None:
        """Abort the request in flight, if there is one: its reply would belong to nothing."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None


async def _off_loop(call: Callable[[], T]) -> T:
    def guarded() -> T:
        try:
            return call()
        except StopIteration as error:  # a future cannot carry it: whoever awaits would wait for ever
            raise RuntimeError(f"the environment raised StopIteration: {error}") from error

    return await asyncio.get_running_loop().run_in_executor(STEPPERS, guarded)


def _check_text(env: gymnasium.Env[str, str]) -> None:
    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not isinstance(space, Text | gymnasium.spaces.Text):
            raise ConfigError(
                f"an engine speaks text, but the {name} space of {env} is {space}: "
                "wrap the environment so that both its spaces are rlenv.spaces.Text()"
            )
