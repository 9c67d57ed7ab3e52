"""Two data-parallel ranks in one engine: a call reaches both, and an update is proven on both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults import FaultyEngine, perturb
from rlenv.engine.transfer.sender import ModelSender
from rlenv.errors import WeightUpdateError
from rlenv.models import default_model
from rlenv.types import Completion, Sample

pytestmark = pytest.mark.engine

PROMPT = [9, 8, 7]
LONG = Sample(max_tokens=200, ignore_eos=True)


class TwoRanks(FaultyEngine):
    """Tells the ranks apart, and breaks the second alone."""

    def requests_of_ranks(self) -> Counter[bytes]:
        return Counter(self._llm.engine_core.reqs_in_flight.values())

    async def break_second(self, how: str = "") -> None:
        core = self._llm.engine_core
        call = core._call_utility_async(
            "collective_rpc", "rlenv_break", None, (how, ""), None, engine=core.core_engines[1]
        )
        await asyncio.wrap_future(self.start(call))


@pytest.fixture(scope="module")
def engine() -> Iterator[TwoRanks]:
    settings: dict[str, Any] = {"max_model_len": 256, "data_parallel_size": 2, "cpu_cores": "0|1"}
    with TwoRanks(default_model(), device="cpu", **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)


def test_update_reaches_both_ranks_and_is_proven_on_both(engine: TwoRanks, model: Any) -> None:
    async def scenario() -> list[Completion]:
        await asyncio.gather(*(engine.generate(PROMPT, LONG) for _ in range(8)))  # the first batch takes a while
        futures = [engine.submit(PROMPT, LONG, request_id=f"r{i}") for i in range(8)]
        while min(engine.progress().values(), default=0) < 10:  # noqa: ASYNC110 - a count, no event
            await asyncio.sleep(0.005)
        shares = engine.requests_of_ranks().values()
        assert len(shares) == 2 and min(shares) >= 1 and sum(shares) == 8
        perturb(model, seed=1)
        await engine.pause("keep")
        await asyncio.sleep(0.3)
        assert engine.in_flight == 8
        await engine.update_weights(ModelSender(model, backend="shm"), 1)
        return [await asyncio.wrap_future(future) for future in futures]

    completions = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [[span.label for span in completion.spans] for completion in completions] == [["0", "1"]] * 8
    rows = engine.start(engine.worker_weights()).result(30)
    assert len(rows) == 2 and rows[0] == rows[1]
    kinds = Counter(result.kind for result in engine.start(engine.canaries()).result(30))
    assert kinds == {"prefill": 2, "decode": 2, "cached-prefix": 4}
    asyncio.run(engine.proven({"0", "1"}))


@pytest.mark.parametrize("how", ["loads nothing", "does not repack"])
def test_rank_that_was_not_updated_refutes_the_update(engine: TwoRanks, model: Any, how: str) -> None:
    version = engine.weight_version + 1
    perturb(model, seed=version)
    asyncio.run(engine.break_second(how))
    with pytest.raises(WeightUpdateError, match=r"model|lm_head"):
        engine.update_weights_sync(ModelSender(model, backend="shm"), version)
    with pytest.raises(WeightUpdateError):
        asyncio.run(engine.proven({str(version)}))
    asyncio.run(engine.break_second())
    report = engine.update_weights_sync(ModelSender(model, backend="shm"), version + 1)
    asyncio.run(engine.proven({report.label}))


def test_requests_of_both_ranks_can_be_aborted(engine: TwoRanks) -> None:
    async def scenario() -> list[Completion]:
        futures = [engine.submit(PROMPT, LONG, request_id=f"r{i}") for i in range(4)]
        await asyncio.sleep(0.05)
        await engine.abort(["r1", "r2"])
        return [await asyncio.wrap_future(future) for future in futures]

    completions = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [completion.finish_reason for completion in completions] == ["length", "abort", "abort", "length"]
