"""The table of pause modes: what became of eight requests in flight and of one that came during the pause."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.faults import FaultyEngine
from benchmarks.modes import BEGUN, REQUESTS, TOKENS, Row, measure_all
from rlenv.models import default_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def rows(vllm_engine: FaultyEngine) -> dict[tuple[str, bool], Row]:
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    rows = asyncio.run(asyncio.wait_for(measure_all(vllm_engine, model), 120))
    return {(row.mode, row.clear_cache): row for row in rows}


@pytest.mark.parametrize("clear_cache", [True, False])
def test_abort_gives_back_what_was_sampled_and_finishes_none(
    rows: dict[tuple[str, bool], Row], clear_cache: bool
) -> None:
    row = rows["abort", clear_cache]
    assert (row.finished, row.aborted, row.new_tokens, row.stale_tokens) == (0, REQUESTS, 0, 0)
    assert REQUESTS * BEGUN <= row.old_tokens < REQUESTS * TOKENS


@pytest.mark.parametrize("clear_cache", [True, False])
def test_wait_finishes_all_on_the_old_weights(rows: dict[tuple[str, bool], Row], clear_cache: bool) -> None:
    row = rows["wait", clear_cache]
    assert (row.finished, row.aborted) == (REQUESTS, 0)
    assert (row.old_tokens, row.new_tokens, row.stale_tokens) == (REQUESTS * TOKENS, 0, 0)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_keep_finishes_all_on_the_new_weights(rows: dict[tuple[str, bool], Row], clear_cache: bool) -> None:
    row = rows["keep", clear_cache]
    assert (row.finished, row.aborted) == (REQUESTS, 0)
    assert row.old_tokens + row.new_tokens == REQUESTS * TOKENS
    assert row.old_tokens >= REQUESTS * BEGUN and row.new_tokens > 0
    assert row.stale_tokens == (0 if clear_cache else row.new_tokens)


def test_request_sent_during_the_pause_waits_for_the_new_weights(rows: dict[tuple[str, bool], Row]) -> None:
    assert len(rows) == 6
    assert {(row.late_version, row.late_finish) for row in rows.values()} == {(0, "length")}
