"""What every engine must do, whatever it runs on. To put another engine under the contract, write a fixture that
gives an `EngineCase` and name it in `ENGINES`; the suite never closes the engine, so that it may be shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rlenv.engine.base import Engine, Manifest, PauseMode, WeightSyncClient
from rlenv.errors import ConfigError
from rlenv.render import text_of
from rlenv.types import Completion, Sample

if TYPE_CHECKING:
    from conftest import EngineCase

ENGINES = [
    "scripted_case",
    pytest.param("group_case", marks=pytest.mark.slow),
    *(pytest.param(f"{kind}_case", marks=pytest.mark.engine) for kind in ("vllm", "server", "vllm_group", "ray")),
]
GREEDY = Sample(temperature=0.0, max_tokens=12, ignore_eos=True)
TOKENS = 200
LONG = Sample(max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest) -> EngineCase:
    case: EngineCase = request.getfixturevalue(request.param)
    return case


def test_engine_honours_the_protocol(case: EngineCase) -> None:
    assert isinstance(case.engine, Engine)


def test_completion_is_exact(case: EngineCase) -> None:
    completion = case.engine.submit(case.prompt_ids, LONG).result(60)
    assert completion.prompt_ids == tuple(case.prompt_ids)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == len(completion.logprobs) == TOKENS
    assert all(logprob <= 0.0 for logprob in completion.logprobs)
    assert completion.text == text_of(case.engine.tokenizer, completion.token_ids)
    [span] = completion.spans
    assert (span.version, span.start, span.end, span.stale_context) == (case.engine.weight_version, 0, TOKENS, False)


def test_greedy_sampling_repeats_itself(case: EngineCase) -> None:
    first, second = (case.engine.submit(case.prompt_ids, GREEDY) for _ in range(2))
    assert first.result(60).token_ids == second.result(60).token_ids


def test_text_ends_with_the_stop_string_and_ids_are_those_sampled(case: EngineCase) -> None:
    free = case.engine.submit(case.prompt_ids, GREEDY).result(60)
    stop = free.text[2:4]
    stopped = case.engine.submit(case.prompt_ids, replace(GREEDY, stop=(stop,))).result(60)
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.find(stop) + len(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.logprobs) == len(stopped.token_ids) < len(free.token_ids)


def test_without_max_tokens_the_context_is_filled(case: EngineCase) -> None:
    prompt = (case.prompt_ids * case.engine.max_model_len)[: case.engine.max_model_len - 5]
    completion = case.engine.submit(prompt, Sample(ignore_eos=True)).result(60)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


@pytest.mark.parametrize("excess", [0, 1, 9])
def test_prompt_without_room_for_an_answer_is_refused(case: EngineCase, excess: int) -> None:
    prompt = (case.prompt_ids * case.engine.max_model_len)[: case.engine.max_model_len + excess]
    with pytest.raises(ConfigError, match="leaves no room"):
        case.engine.submit(prompt, Sample())
    with pytest.raises(ConfigError, match="empty"):
        case.engine.submit([], Sample())
    assert case.engine.in_flight == 0


def test_threads_and_coroutines_share_the_engine(case: EngineCase) -> None:
    def in_a_loop_of_its_own() -> list[Completion]:
        return asyncio.run(_gather(case, 16))

    with ThreadPoolExecutor(20) as pool:
        threads = [pool.submit(lambda: case.engine.submit(case.prompt_ids, LONG).result(60)) for _ in range(16)]
        loops = [pool.submit(in_a_loop_of_its_own) for _ in range(2)]
        completions = [*(thread.result() for thread in threads), *loops[0].result(), *loops[1].result()]
    assert [len(completion.token_ids) for completion in completions] == [TOKENS] * 48
    assert case.engine.in_flight == 0


def test_one_id_for_two_live_requests_mixes_nothing_up(case: EngineCase) -> None:
    lengths = [5, 50, 20, 35]
    futures = [case.engine.submit(case.prompt_ids, replace(LONG, max_tokens=n), request_id="same") for n in lengths]
    completions = [future.result(60) for future in futures]
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert {completion.request_id for completion in completions} == {"same"}


@pytest.mark.parametrize("name", ["same", ""])
def test_requests_of_one_name_come_back_with_their_own_output(case: EngineCase, name: str) -> None:
    prompts = [(*case.prompt_ids, *extra) for extra in ((), (17,), (18, 17), (19,))]
    alone = [case.engine.submit(prompt, GREEDY, request_id=f"{i}").result(60) for i, prompt in enumerate(prompts)]
    together = [case.engine.submit(prompt, GREEDY, request_id=name) for prompt in prompts]
    for prompt, reference, future in zip(prompts, alone, together, strict=True):
        assert (future.result(60).prompt_ids, future.result(60).token_ids) == (prompt, reference.token_ids)


def test_id_can_be_used_again_right_after_its_abort(case: EngineCase) -> None:
    async def scenario() -> tuple[Completion, Completion]:
        first = asyncio.wrap_future(case.engine.submit(case.prompt_ids, LONG, request_id="again"))
        await case.engine.abort(["again"])
        return await first, await case.engine.generate(case.prompt_ids, LONG, request_id="again")

    first, second = _run(scenario())
    assert first.finish_reason == "abort"
    assert (second.finish_reason, len(second.token_ids)) == ("length", TOKENS)


def test_abort_ends_the_named_requests_and_no_other(case: EngineCase) -> None:
    async def scenario() -> list[Completion]:
        futures = [case.engine.submit(case.prompt_ids, LONG, request_id=f"abort-{i}") for i in range(8)]
        await _underway(case)
        await case.engine.abort(["abort-2", "abort-5", "abort-6", "nobody"])
        return [await asyncio.wrap_future(future) for future in futures]

    completions = _run(scenario())
    assert [i for i, completion in enumerate(completions) if completion.finish_reason == "abort"] == [2, 5, 6]
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) == sum(s.end - s.start for s in completion.spans)
        assert (len(completion.token_ids) < TOKENS) == (completion.finish_reason == "abort")


def test_abort_without_names_ends_all(case: EngineCase) -> None:
    async def scenario() -> list[Completion]:
        futures = [case.engine.submit(case.prompt_ids, LONG) for _ in range(4)]
        await case.engine.abort()
        return [await asyncio.wrap_future(future) for future in futures]

    assert {completion.finish_reason for completion in _run(scenario())} == {"abort"}
    assert case.engine.in_flight == 0


@pytest.mark.parametrize("paused", [False, True])
def test_cancelling_the_await_leaves_no_request_behind(case: EngineCase, paused: bool) -> None:
    async def scenario() -> None:
        if paused:
            await case.engine.pause("keep")
        waiting = asyncio.create_task(case.engine.generate(case.prompt_ids, LONG))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await case.engine.resume()
        await case.engine.pause("wait")  # returns once nothing is left in the engine
        await case.engine.resume()

    _run(scenario())
    assert case.engine.in_flight == 0


def test_pause_and_resume_have_no_undefined_state(case: EngineCase) -> None:
    engine = case.engine

    async def scenario() -> Completion:
        await _soon(engine.resume())
        assert not await engine.is_paused()
        await _soon(engine.pause("keep"))
        await _soon(engine.pause("keep"))
        assert await engine.is_paused()
        waiting = asyncio.create_task(engine.generate(case.prompt_ids, GREEDY))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await _soon(engine.resume())
        assert not await engine.is_paused()
        return await waiting

    assert len(_run(scenario()).token_ids) == 12


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pausing_twice_is_pausing_once(case: EngineCase, mode: PauseMode) -> None:
    async def scenario() -> Completion:
        await _soon(case.engine.pause(mode))
        await _soon(case.engine.pause(mode))
        waiting = case.engine.submit(case.prompt_ids, GREEDY)
        await _soon(case.engine.resume())
        return await asyncio.wrap_future(waiting)

    assert _run(scenario()).finish_reason == "length"


def test_requests_that_are_kept_can_be_aborted_and_not_waited_for(case: EngineCase) -> None:
    async def scenario() -> Completion:
        kept = case.engine.submit(case.prompt_ids, LONG)
        await _underway(case)
        await case.engine.pause("keep")
        with pytest.raises(ConfigError, match="resume first"):
            await case.engine.pause("wait")
        await case.engine.pause("abort")
        completion = kept.result(1)
        await case.engine.resume()
        return completion

    completion = _run(scenario())
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < TOKENS


def test_pause_knows_its_three_modes_only(case: EngineCase) -> None:
    with pytest.raises(ConfigError, match="'abort', 'wait' or 'keep'"):
        asyncio.run(case.engine.pause("stop"))  # type: ignore[arg-type]
    assert not asyncio.run(case.engine.is_paused())


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_keep_loses_no_request_and_no_token(case: EngineCase, clear_cache: bool) -> None:
    async def scenario() -> list[Completion]:
        futures = [case.engine.submit(case.prompt_ids, LONG) for _ in range(8)]
        await _underway(case)
        await case.engine.pause("keep", clear_cache=clear_cache)
        await asyncio.sleep(0.3)
        assert case.engine.in_flight == 8
        await case.engine.resume()
        return [await asyncio.wrap_future(future) for future in futures]

    completions = _run(scenario())
    assert [completion.finish_reason for completion in completions] == ["length"] * 8
    assert [len(completion.token_ids) for completion in completions] == [TOKENS] * 8


def test_pause_wait_returns_when_all_in_flight_are_done(case: EngineCase) -> None:
    async def scenario() -> list[Completion]:
        futures = [case.engine.submit(case.prompt_ids, LONG) for _ in range(4)]
        await _underway(case)
        await case.engine.pause("wait")
        late = case.engine.submit(case.prompt_ids, GREEDY)
        completions = [future.result(1) for future in futures]
        await asyncio.sleep(0.1)
        assert not late.done()
        await case.engine.resume()
        return [*completions, await asyncio.wrap_future(late)]

    assert [completion.finish_reason for completion in _run(scenario())] == ["length"] * 5


def test_pause_abort_gives_partial_results_marked_as_such(case: EngineCase) -> None:
    async def scenario() -> list[Completion]:
        futures = [case.engine.submit(case.prompt_ids, LONG) for _ in range(4)]
        await _underway(case)
        await case.engine.pause("abort")
        assert await case.engine.is_paused()
        completions = [future.result(1) for future in futures]
        await case.engine.resume()
        return completions

    for completion in _run(scenario()):
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) < TOKENS


def test_update_mid_generation_switches_labels_at_a_token(case: EngineCase) -> None:
    engine, version = case.engine, case.engine.weight_version + 1

    async def scenario() -> list[Completion]:
        futures = [engine.submit(case.prompt_ids, LONG) for _ in range(8)]
        await _underway(case)
        report = await engine.update_weights(case.sender, version)
        assert (report.version, report.in_flight, report.tensors > 0) == (version, 8, True)
        assert report.stall_s == report.pause_s + report.transfer_s + report.resume_s
        assert engine.weight_version == version
        completions = [await asyncio.wrap_future(future) for future in futures]
        await _soon(engine.proven({label for completion in completions for label in completion.labels}))
        return completions

    for completion in _run(scenario()):
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", TOKENS)
        before, after = completion.spans
        assert (before.version, after.version) == (version - 1, version)
        assert 0 == before.start < before.end == after.start < after.end == TOKENS
        assert not after.stale_context


def test_update_without_clearing_the_cache_marks_stale_context(case: EngineCase) -> None:
    engine, version = case.engine, case.engine.weight_version + 1

    async def scenario() -> tuple[Completion, Completion]:
        under_way = engine.submit(case.prompt_ids, LONG)
        await _underway(case)
        await engine.update_weights(case.sender, version, clear_cache=False)
        under_way_done = await asyncio.wrap_future(under_way)
        await engine.pause("keep", clear_cache=True)
        await engine.resume()
        return under_way_done, await engine.generate(case.prompt_ids, LONG)

    under_way, fresh = _run(scenario())
    assert [span.stale_context for span in under_way.spans] == [False, True]
    assert [span.stale_context for span in fresh.spans] == [False]


@pytest.mark.parametrize("paused", [False, True], ids=["before the pause", "during the pause"])
def test_failed_update_leaves_the_old_weights_serving(case: EngineCase, paused: bool) -> None:
    class Broken:
        def send(self, client: WeightSyncClient) -> Manifest:
            if paused:
                client.start_weight_update()
            raise RuntimeError("the wire broke")

        logprobs = case.sender.logprobs

    version = case.engine.weight_version

    async def scenario() -> Completion:
        waiting = asyncio.create_task(case.engine.generate(case.prompt_ids, LONG))
        await _underway(case)
        with pytest.raises(RuntimeError, match="the wire broke"):
            await asyncio.wait_for(case.engine.update_weights(Broken(), version + 1), 30)
        assert not await case.engine.is_paused()
        return await waiting

    completion = _run(scenario())
    assert case.engine.weight_version == version
    assert [span.version for span in completion.spans] == [version]
    assert completion.finish_reason == "length"


def test_every_update_has_a_label_of_its_own(case: EngineCase) -> None:
    version = case.engine.weight_version + 1

    async def scenario() -> list[str]:
        return [(await case.engine.update_weights(case.sender, version)).label for _ in range(2)]

    assert _run(scenario()) == [f"{version}", f"{version}#2"]
    assert case.engine.weight_version == version


def _run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def _gather(case: EngineCase, count: int) -> list[Completion]:
    return await asyncio.gather(*(case.engine.generate(case.prompt_ids, LONG) for _ in range(count)))


async def _soon(call: Coroutine[Any, Any, None]) -> None:
    began = time.monotonic()
    await call
    assert time.monotonic() - began < 5


async def _underway(case: EngineCase) -> None:
    """Wait until requests that were submitted before have begun: a short one behind them has ended."""
    await case.engine.generate(case.prompt_ids, replace(LONG, max_tokens=12))
