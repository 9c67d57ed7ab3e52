"""An environment bound to an engine and an agent go in, a training row comes out: a Trajectory, or why there is none.

    act ─Sample→ astep ─Completion→ row        once a turn, until terminated or truncated
     ▲                     │
     └──────── View ◀──────┘

The row only grows: each completion's prompt must begin with the row so far, and the loss mask is born here, beside
the sampled ids. What goes wrong in an environment belongs to that one episode and becomes a `Failure`; what goes
wrong in the engine, the settings or the agent stops the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from rlenv.bound import EngineBoundEnv
from rlenv.errors import AbortedError, RlenvError
from rlenv.types import Completion, Failure, Group, Sample, Trajectory, VersionSpan, View

T = TypeVar("T")


class Agent(Protocol):
    """Decides what to do next from what it has seen: sample in some way, or say a text of its own."""

    def act(self, view: View) -> str | Sample:
        """The next action. Runs on the event loop, between all other rollouts: it must not block."""


class EnvPool:
    """Environments for rollouts that run at once: made when needed, used again, never by two at a time.

    Belongs to one event loop. An environment that raised, or whose episode was cancelled, is not used again.
    """

    def __init__(self, make: Callable[[], EngineBoundEnv]) -> None:
        self._make = make
        self._idle: list[EngineBoundEnv] = []
        self._lent: set[EngineBoundEnv] = set()

    async def take(self) -> EngineBoundEnv:
        env = self._idle.pop() if self._idle else await asyncio.to_thread(self._make)
        self._lent.add(env)
        return env

    def give_back(self, env: EngineBoundEnv) -> None:
        self._lent.remove(env)
        self._idle.append(env)

    async def discard(self, env: EngineBoundEnv) -> None:
        """Close an environment that failed; should even that fail, its episode was counted already."""
        self._lent.remove(env)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(env.close)

    def close(self) -> None:
        """Close all environments, those of cancelled episodes included."""
        for env in (*self._idle, *self._lent):
            env.close()
        self._idle.clear()
        self._lent.clear()


async def rollout(
    env: EngineBoundEnv,
    agent: Agent,
    *,
    seed: int,
    sample_seed: int | None = None,
    options: dict[str, Any] | None = None,
) -> Trajectory | Failure:
    """Play the episode that `reset(seed=seed, options=options)` opens.

    With a `sample_seed`, each turn's `Sample` that has no seed gets one of its own, derived from it. The
    trajectory's `info` is the environment's last, with `samples` (what was asked of the engine, turn by turn),
    `sample_seed`, `turn_rewards`, the named parts of all turns added up as `rewards`, and what makes the episode
    again: `spec` and `options`. A Failure's cause is "aborted", "abstained", "prompt_too_long", or the name of the
    exception that the environment raised.
    """
    try:
        return await _play(env, agent, seed, sample_seed, options)
    except _EnvFault as fault:
        return fault.failure


async def rollout_group(
    pool: EnvPool,
    agent: Agent,
    *,
    id: int,
    seed: int,
    group_size: int,
    run_seed: int = 0,
    seeded: bool = True,
    options: dict[str, Any] | None = None,
) -> Group:
    """`group_size` rollouts at once, of one task at one `seed`, which differ in what is sampled.

    With `seeded`, sampling repeats itself: member m samples with a seed derived from (run_seed, id, m). Without,
    the engine draws its own seeds, which is faster by a tenth in vLLM.
    """

    async def member(number: int) -> Trajectory | Failure:
        sample_seed = _derived(run_seed, id, number) if seeded else None
        env = await pool.take()
        try:
            outcome = await _play(env, agent, seed, sample_seed, options)
        except _EnvFault as fault:
            await pool.discard(env)
            return fault.failure
        pool.give_back(env)
        return outcome

    outcomes = await _all([asyncio.create_task(member(number)) for number in range(group_size)])
    return Group(
        id=id,
        task=outcomes[0].task,
        seed=seed,
        trajectories=tuple(outcome for outcome in outcomes if isinstance(outcome, Trajectory)),
        failures=tuple(outcome for outcome in outcomes if isinstance(outcome, Failure)),
    )


def add_parts(so_far: Mapping[str, float], info: Mapping[str, Any]) -> dict[str, float]:
    """The named parts of rewards with those that a step's `info["rewards"]` adds, if it is what TextEnv puts there."""
    parts = info.get("rewards")
    if not isinstance(parts, Mapping) or not all(isinstance(part, int | float) for part in parts.values()):
        return dict(so_far)
    return {**so_far, **{str(name): so_far.get(str(name), 0.0) + part for name, part in parts.items()}}


async def _play(
    env: EngineBoundEnv, agent: Agent, seed: int, sample_seed: int | None, options: dict[str, Any] | None
) -> Trajectory | Failure:
    played = _Played(env, seed, sample_seed, options)
    _, info = await played.in_env(env.areset(seed=seed, options=options))
    row = _Row()
    terminated, truncated = False, False
    while not (terminated or truncated):
        action = agent.act(View(messages=env.messages, turn=len(played.rewards), info=info))
        if isinstance(action, Sample):
            action = _seeded(action, sample_seed, len(played.rewards))
            played.samples.append(action)
        try:
            _, reward, terminated, truncated, info = await played.in_env(env.astep(action))
        except AbortedError as error:
            return played.failure("aborted", str(error))
        if cause := _no_verdict(info):
            return played.failure(*cause)
        if isinstance(completion := info.get("completion"), Completion):
            row.add(completion)
        played.earn(reward, info)
    return Trajectory(
        task=played.task,
        seed=seed,
        token_ids=tuple(row.token_ids),
        loss_mask=tuple(row.loss_mask),
        logprobs=tuple(row.logprobs),
        spans=tuple(row.spans),
        messages=env.messages,
        reward=sum(played.rewards),
        terminated=terminated,
        truncated=truncated,
        turns=len(played.rewards),
        info={**{key: value for key, value in info.items() if key != "completion"}, **played.info()},
    )


@dataclass(slots=True)
class _Played:
    """What one episode was made from and has earned so far."""

    env: EngineBoundEnv
    seed: int
    sample_seed: int | None
    options: dict[str, Any] | None
    samples: list[Sample] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return self.env.spec.id if self.env.spec else type(self.env.unwrapped).__name__

    def earn(self, reward: float, info: Mapping[str, Any]) -> None:
        self.rewards.append(reward)
        self.parts = add_parts(self.parts, info)

    def info(self) -> dict[str, Any]:
        """What a trajectory's `info` tells beside the environment's own."""
        return {
            "rewards": dict(self.parts),
            "turn_rewards": tuple(self.rewards),
            "samples": tuple(self.samples),
            "sample_seed": self.sample_seed,
            "options": dict(self.options or {}),
            "spec": self.env.spec,
        }

    def failure(self, cause: str, message: str) -> Failure:
        return Failure(self.task, self.seed, cause, message, self.env.messages, self.info())

    async def in_env(self, call: Awaitable[T]) -> T:
        """Await a call into the environment; what is not its fault (engine, settings, cancelling) passes."""
        try:
            return await call
        except (RlenvError, CancelledError):
            raise
        except Exception as error:
            raise _EnvFault(self.failure(type(error).__name__, str(error))) from error


@dataclass(slots=True)
class _Row:
    """A training row under construction; every list has length N."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(self, completion: Completion) -> None:
        """Append what came between the turns, not sampled, and what was sampled."""
        so_far = len(self.token_ids)
        if list(completion.prompt_ids[:so_far]) != self.token_ids:
            raise RlenvError(f"the prompt of request {completion.request_id} does not begin with the row so far")
        if len(completion.logprobs) != len(completion.token_ids):
            raise RlenvError(f"request {completion.request_id} came back without a log-prob for each sampled id")
        between = completion.prompt_ids[so_far:]
        self._append(between, sampled=False, logprobs=(0.0,) * len(between))
        begin = len(self.token_ids)
        self._append(completion.token_ids, sampled=True, logprobs=completion.logprobs)
        self.spans += [replace(span, start=begin + span.start, end=begin + span.end) for span in completion.spans]

    def _append(self, ids: tuple[int, ...], *, sampled: bool, logprobs: tuple[float, ...]) -> None:
        self.token_ids += ids
        self.loss_mask += [sampled] * len(ids)
        self.logprobs += logprobs


def _no_verdict(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a step has no reward, as cause and message; None when it has one."""
    if failure := info.get("failure"):
        return str(failure), f"the environment reported {failure}"
    if abstained := info.get("abstained"):
        return "abstained", str(abstained)
    return None


class _EnvFault(Exception):
    """An environment raised: its episode is lost, and it is not to be trusted with another."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _seeded(sample: Sample, sample_seed: int | None, turn: int) -> Sample:
    """Turns draw from streams of their own: with one for all, a second attempt would repeat the first."""
    if sample_seed is None or sample.seed is not None:
        return sample
    return replace(sample, seed=_derived(sample_seed, turn))


def _derived(*entropy: int) -> int:
    """A seed below 2**63 that depends on all of these numbers, equal on every machine."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


async def _all(tasks: list[asyncio.Task[Trajectory | Failure]]) -> list[Trajectory | Failure]:
    """Every result; when one task raises, the others are ended first, so that none is left behind."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
