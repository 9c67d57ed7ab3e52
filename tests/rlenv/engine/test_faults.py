"""Every way in which we know a weight update to go wrong is caught, and right ones raise no alarm."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from benchmarks.faults import LONG, Fault, FaultyEngine, catalogue, inject, is_proven, perturb, smallest_errors
from rlenv.engine.transfer.sender import ModelSender
from rlenv.models import default_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model() -> Any:
    """The shipped model in fp32, which the tests of this module move about."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)


@pytest.mark.parametrize("fault", catalogue(), ids=lambda fault: fault.name)
def test_fault_is_caught_and_none_of_its_tokens_is_proven(vllm_engine: FaultyEngine, model: Any, fault: Fault) -> None:
    caught = asyncio.run(asyncio.wait_for(inject(vllm_engine, model, fault), 60))
    assert caught.withheld == (0 if fault.harmless else caught.in_flight)


def test_two_hundred_right_updates_raise_no_alarm(vllm_engine: FaultyEngine, model: Any) -> None:
    async def scenario() -> list[float]:
        sender = ModelSender(model, backend=vllm_engine.transport, dtype=vllm_engine.dtype)
        mismatches = []
        flying = [asyncio.create_task(vllm_engine.generate([9, 8, 7, i], LONG)) for i in range(8)]
        for _ in range(200):
            perturb(model, seed=vllm_engine.weight_version, size=1e-4)
            report = await vllm_engine.update_weights(sender, vllm_engine.weight_version + 1)
            mismatches.append(report.mismatch_max)
        for completion in await asyncio.gather(*flying):
            assert completion.finish_reason == "length"
            assert await is_proven(vllm_engine, completion)
        return mismatches

    mismatches = asyncio.run(scenario())
    assert len(mismatches) == 200
    assert max(mismatches) <= 1e-4


def test_fingerprints_are_needed_where_canaries_are_blind(model: Any) -> None:
    smallest = smallest_errors(model)
    assert all(limit < 0.05 for kind, limit in smallest["float32"].items() if kind != "fingerprint")
    # In bfloat16 a whole layer norm may be off by more than a tenth before the canaries' mean passes its noise.
    assert max(smallest["bfloat16"].values()) > 0.1 > smallest["bfloat16"]["fingerprint"]


def test_engine_leaves_no_thread_of_a_finished_update_behind(vllm_engine: FaultyEngine, model: Any) -> None:
    sender = ModelSender(model, backend=vllm_engine.transport, dtype=vllm_engine.dtype)
    vllm_engine.update_weights_sync(sender, vllm_engine.weight_version + 1)
    before = threading.active_count()
    for _ in range(5):
        vllm_engine.update_weights_sync(sender, vllm_engine.weight_version)
    assert threading.active_count() <= before + 1
