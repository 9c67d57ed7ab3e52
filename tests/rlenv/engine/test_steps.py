"""More requests than one step of the real engine can take in: each is served whole, and a seed says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable

import pytest

import rlenv
from rlenv.agents.sampler import Sampler
from rlenv.engine.vllm import VLLMEngine
from rlenv.rollout import EnvPool, rollout_group
from rlenv.types import Completion, Group, Sample

pytestmark = pytest.mark.engine

REQUESTS, PROMPT_IDS, TOKENS = 64, 200, 32


def test_seeded_requests_beyond_one_step_are_all_served_and_repeat_themselves(vllm_engine: VLLMEngine) -> None:
    assert vllm_engine._settings.arguments["max_num_batched_tokens"] < REQUESTS * PROMPT_IDS
    first = _serve(vllm_engine, range(REQUESTS))
    assert {(len(one.prompt_ids), len(one.token_ids)) for one in first.values()} == {(PROMPT_IDS, TOKENS)}
    assert {one.finish_reason for one in first.values()} == {"length"}
    assert len({one.token_ids for one in first.values()}) == REQUESTS
    again = _serve(vllm_engine, reversed(range(REQUESTS)))  # other neighbours in each step
    assert {seed: one.token_ids for seed, one in again.items()} == {seed: one.token_ids for seed, one in first.items()}
    assert vllm_engine.in_flight == 0


def test_a_seeded_group_differs_within_itself_and_repeats_its_seeds(vllm_engine: VLLMEngine) -> None:
    def group() -> Group:
        agent = Sampler(Sample(max_tokens=64, ignore_eos=True))
        with contextlib.closing(EnvPool(lambda: rlenv.make("math-v0", engine=vllm_engine))) as pool:
            return asyncio.run(rollout_group(pool, agent, id=0, seed=0, group_size=8, run_seed=0))

    first, second = group(), group()
    assert len(first.trajectories) == 8 and {sum(row.loss_mask) for row in first.trajectories} == {64}
    assert len({row.token_ids for row in first.trajectories}) >= 2
    seeds = [[row.info["sample_seed"] for row in one.trajectories] for one in (first, second)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 8
    assert [row.token_ids for row in first.trajectories] == [row.token_ids for row in second.trajectories]


def _serve(engine: VLLMEngine, seeds: Iterable[int]) -> dict[int, Completion]:
    """One request a seed, all at once."""
    engine.pause_sync()  # so that the scheduler finds all of them
    futures = {
        seed: engine.submit(
            random.Random(seed).choices(range(10, 260), k=PROMPT_IDS),
            Sample(temperature=2.0, seed=seed, max_tokens=TOKENS, ignore_eos=True),
        )
        for seed in seeds
    }
    engine.resume_sync()
    return {seed: future.result(60) for seed, future in futures.items()}
