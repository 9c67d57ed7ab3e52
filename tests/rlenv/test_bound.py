"""Scripted policies go in; what an engine-bound environment samples, keeps, truncates and refuses comes out."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any

import gymnasium
import pytest

import rlenv
from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.render import Renderer

Scripted = Callable[..., ScriptedEngine]


class Counting(rlenv.TextEnv):
    """Says the number of the turn, padded to `width`, and ends after the third."""

    def __init__(self, width: int = 1, ends: int = 3) -> None:
        super().__init__()
        self.width, self.ends = width, ends

    def start(self, options: Mapping[str, Any]) -> str:
        return "go" + "!" * int(options.get("extra", 0))

    def turn(self, action: str) -> rlenv.Turn:
        over = self.turns == self.ends
        return rlenv.Turn(1.0, str(self.turns).rjust(self.width, "."), terminated=over, info={"said": action})


def bound(engine: ScriptedEngine, **kwargs: Any) -> EngineBoundEnv:
    return EngineBoundEnv(Counting(**kwargs), engine)


def test_a_sample_is_continued_by_the_engine_and_its_completion_is_told(scripted: Scripted) -> None:
    env = bound(scripted(lambda ids, sample: "hello"))
    env.reset(seed=0)
    prompt = env.token_ids
    observation, reward, terminated, truncated, info = env.step(rlenv.Sample())
    assert (observation, reward, terminated, truncated, info["said"]) == ("1", 1.0, False, False, "hello")
    assert info["completion"].prompt_ids == prompt
    assert info["completion"].text == "hello"


def test_text_passes_through_without_the_engine(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: pytest.fail("asked the engine"))
    env = bound(engine)
    env.reset(seed=0)
    *_, info = env.step("by hand")
    assert info == {"said": "by hand"}
    assert env.messages[1] == {"role": "assistant", "content": "by hand"}


def test_each_prompt_is_the_exact_row_so_far_and_the_rendered_reply(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: f"turn {len(ids)}")
    env = bound(engine)
    renderer = Renderer(engine.tokenizer)
    env.reset(seed=0)
    for _ in range(2):
        before = env.token_ids
        observation, *_, info = env.step(rlenv.Sample())
        completion = info["completion"]
        assert completion.prompt_ids == before
        assert env.token_ids == tuple(renderer.extend(before, completion, [{"role": "user", "content": observation}]))
    before = env.token_ids
    *_, info = env.step(rlenv.Sample())
    assert env.token_ids == before + info["completion"].token_ids
    assert [message["role"] for message in env.messages] == ["user", "assistant"] * 3 + ["user"]


def test_a_system_message_opens_every_transcript(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x")
    env = rlenv.make("math-v0", engine=engine, system="Be brief.")
    observation, _ = env.reset(seed=0)
    opening = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": observation})
    assert env.messages == opening
    assert list(env.token_ids) == Renderer(engine.tokenizer).start(opening)


def test_a_reply_that_overflows_the_context_truncates_and_keeps_what_was_earned(scripted: Scripted) -> None:
    env = bound(scripted(lambda ids, sample: "ok", max_model_len=200), width=300)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(rlenv.Sample())
    assert (reward, terminated, truncated, info["truncated_by"]) == (1.0, False, True, "context")
    assert info["completion"].text == "ok"


def test_a_task_that_ends_with_an_overflowing_reply_is_terminated(scripted: Scripted) -> None:
    env = bound(scripted(lambda ids, sample: "ok", max_model_len=200), width=300, ends=1)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(rlenv.Sample())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert "truncated_by" not in info


def test_a_first_prompt_that_does_not_fit_is_told_and_never_sent(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "ok", max_model_len=64)
    env = bound(engine)
    _, info = env.reset(seed=0, options={"extra": 100})
    assert info["failure"] == "prompt_too_long"
    _, reward, terminated, truncated, info = env.step(rlenv.Sample())
    assert (reward, terminated, truncated, info) == (0.0, False, True, {"failure": "prompt_too_long"})
    assert engine.peak_in_flight == 0


def test_an_aborted_completion_is_an_error_and_no_answer(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "never done", delay=0.05)
    env = bound(engine)
    env.reset(seed=0)
    pending = env.begin(rlenv.Sample())
    asyncio.run(engine.abort())
    with pytest.raises(rlenv.AbortedError, match="aborted"):
        env.finish(rlenv.Sample(), pending.result())
    assert env.unwrapped.turns == 0


def test_a_late_reply_for_an_episode_that_was_reset_is_refused(scripted: Scripted) -> None:
    env = bound(scripted(lambda ids, sample: "late"))
    env.reset(seed=0)
    pending = env.begin(rlenv.Sample())
    completion = pending.result()
    env.reset(seed=1)
    with pytest.raises(CancelledError, match="reset"):
        env.finish(rlenv.Sample(), completion)
    assert env.unwrapped.turns == 0
    assert len(env.messages) == 1


def test_a_reset_aborts_the_request_in_flight(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "slow", delay=30.0)
    env = bound(engine)
    env.reset(seed=0)
    pending = env.begin(rlenv.Sample())
    env.reset(seed=0)
    assert pending.cancelled()
    assert engine.in_flight == 0


def test_reset_in_mid_episode_starts_a_new_history(scripted: Scripted) -> None:
    env = bound(scripted(lambda ids, sample: "x"))
    env.reset(seed=0)
    env.step(rlenv.Sample())
    env.step(rlenv.Sample())
    env.reset(seed=0)
    env.step(rlenv.Sample())
    assert env.unwrapped.turns == 1
    assert len(env.messages) == 3


def test_astep_is_step(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "same")

    async def episode() -> tuple[Any, ...]:
        env = bound(engine)
        await env.areset(seed=0)
        return await env.astep(rlenv.Sample())

    observation, reward, terminated, truncated, info = asyncio.run(episode())
    assert (observation, reward, terminated, truncated, info["said"]) == ("1", 1.0, False, False, "same")


def test_a_slow_inner_step_does_not_block_the_event_loop(scripted: Scripted) -> None:
    release = threading.Event()

    class Slow(Counting):
        def turn(self, action: str) -> rlenv.Turn:
            assert release.wait(10)
            return super().turn(action)

    async def run() -> float:
        slow, quick = EngineBoundEnv(Slow(), engine), bound(engine)
        await asyncio.gather(slow.areset(seed=0), quick.areset(seed=0))
        stuck = asyncio.create_task(slow.astep("x"))
        _, reward, *_ = await quick.astep(rlenv.Sample())
        assert not stuck.done()
        release.set()
        await stuck
        return reward

    engine = scripted(lambda ids, sample: "x")
    assert asyncio.run(run()) == 1.0


def test_cancelling_astep_aborts_the_request(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "slow", delay=30.0)

    async def run() -> None:
        env = bound(engine)
        await env.areset(seed=0)
        task = asyncio.create_task(env.astep(rlenv.Sample()))
        await asyncio.sleep(0)  # let it submit
        assert engine.in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.in_flight == 0


def test_64_threads_over_two_tasks_share_the_engine(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "a" * 20, delay=0.01)
    envs = [rlenv.make(task, engine=engine) for task in ("math-v0", "math-retry-v0") for _ in range(32)]
    gate = threading.Barrier(len(envs))

    def run(env: gymnasium.Env[str, Any], seed: int) -> None:
        env.reset(seed=seed)
        gate.wait()
        env.step(rlenv.Sample())

    threads = [threading.Thread(target=run, args=(env, seed)) for seed, env in enumerate(envs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.peak_in_flight >= 48


def test_64_coroutines_over_two_tasks_share_the_engine(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "a" * 20, delay=0.01)
    envs = [rlenv.make(task, engine=engine) for task in ("math-v0", "math-retry-v0") for _ in range(32)]

    async def run() -> None:
        await asyncio.gather(*(env.areset(seed=seed) for seed, env in enumerate(envs)))
        await asyncio.gather(*(env.astep(rlenv.Sample()) for env in envs))

    asyncio.run(run())
    assert engine.peak_in_flight >= 48


def test_the_spec_names_the_task_without_the_engine(scripted: Scripted) -> None:
    env = rlenv.make("math-v0", level=1, engine=scripted(lambda ids, sample: "x"))
    again = rlenv.make(type(env.spec).from_json(env.spec.to_json()))
    assert again.reset(seed=3) == env.reset(seed=3)


def test_deepcopy_shares_the_engine_and_continues_the_same_stream(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x")
    env = rlenv.make("math-v0", engine=engine)
    env.reset(seed=0)
    twin = copy.deepcopy(env)
    assert twin.engine is engine
    assert twin.token_ids == env.token_ids
    assert twin.reset() == env.reset()


def test_pickling_a_bound_environment_says_what_to_send_instead(scripted: Scripted) -> None:
    env = rlenv.make("math-v0", engine=scripted(lambda ids, sample: "x"))
    with pytest.raises(rlenv.ConfigError, match=r"env\.spec"):
        pickle.dumps(env)


def test_closing_twice_aborts_what_is_in_flight_and_leaves_the_engine_open(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x", delay=30.0)
    env = rlenv.make("math-v0", engine=engine)
    env.reset(seed=0)
    env.begin(rlenv.Sample())
    env.close()
    env.close()
    assert engine.in_flight == 0
    engine.delay = 0.0
    env = rlenv.make("math-v0", engine=engine)
    env.reset(seed=0)
    assert env.step(rlenv.Sample())[4]["completion"].text == "x"


def test_an_environment_without_text_is_refused(scripted: Scripted) -> None:
    with pytest.raises(rlenv.ConfigError, match="Box"):
        rlenv.make("CartPole-v1", engine=scripted(lambda ids, sample: "x"))


def test_samples_of_the_action_space_are_text_and_requests_belong_to_it(scripted: Scripted) -> None:
    space = bound(scripted(lambda ids, sample: "x")).action_space
    assert isinstance(space.sample(), str)
    assert rlenv.Sample() in space
    assert 3 not in space
