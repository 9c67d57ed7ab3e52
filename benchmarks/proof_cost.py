"""What the proof of each weight update costs: tokens per second with and without it, in interleaved pairs.

    python -m benchmarks.proof_cost --cadence 10 --pairs 8 --out proof_cost.json

64 requests are in flight throughout. Each interval of `--cadence` seconds begins with a weight update; every second
update skips its proof. What fingerprints and canaries take of the engine's time is measured apart, while it is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import perturb
from rlenv.agents.hardware import hardware, versions
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.vllm import VLLMEngine
from rlenv.models import default_model
from rlenv.types import Sample

CONCURRENT = 64
LONG = Sample(max_tokens=200, ignore_eos=True)


@dataclass
class Count:
    """Tokens of the requests that have ended."""

    tokens: int = 0


async def measure(engine: VLLMEngine, model: Any, pairs: int, cadence: float) -> tuple[list[float], list[float]]:
    """Tokens per second of each interval: with the proof, and without, each pair in turn."""
    count, sender = Count(), ModelSender(model, backend=engine.transport, dtype=engine.dtype)
    clients = [asyncio.create_task(_client(engine, count, i)) for i in range(CONCURRENT)]
    await _interval(engine, sender, model, count, 2.0, proof=True)  # a warm-up
    proven: list[float] = []
    bare: list[float] = []
    for pair in range(pairs):
        for proof in (True, False) if pair % 2 else (False, True):
            rate = await _interval(engine, sender, model, count, cadence, proof)
            (proven if proof else bare).append(rate)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return proven, bare


async def _interval(
    engine: VLLMEngine, sender: ModelSender, model: Any, count: Count, seconds: float, proof: bool
) -> float:
    perturb(model, seed=engine.weight_version, size=1e-5)
    before, begun = _sampled(engine, count), time.perf_counter()
    engine.proof = proof
    await engine.update_weights(sender, engine.weight_version + 1)
    await asyncio.sleep(max(0.0, begun + seconds - time.perf_counter()))
    return (_sampled(engine, count) - before) / (time.perf_counter() - begun)


async def _client(engine: VLLMEngine, count: Count, number: int) -> None:
    while True:
        completion = await engine.generate([9, 8, 7, number], LONG)
        count.tokens += len(completion.token_ids)


def _sampled(engine: VLLMEngine, count: Count) -> int:
    return count.tokens + sum(engine.progress().values())


def _median_s(call: Callable[[], Any], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="benchmarks.proof_cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--cadence", type=float, default=10.0, help="seconds from one update to the next")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--out", help="where the JSON goes")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    with VLLMEngine(default_model(), device="cpu", max_model_len=256) as engine:
        sender = ModelSender(model, backend=engine.transport, dtype=engine.dtype)
        engine.update_weights_sync(sender, 1)
        canaries = engine.start(engine.canaries()).result()
        idle = {
            "fingerprints_s": _median_s(lambda: engine.start(engine.worker_weights()).result()),
            "canaries_s": _median_s(lambda: engine.start(engine.canaries()).result()),
            "learner_forward_s": _median_s(lambda: sender.logprobs([canary.ids for canary in canaries])),
        }
        proven, bare = asyncio.run(measure(engine, model, arguments.pairs, arguments.cadence))
    ratios = [a / b for a, b in zip(proven, bare, strict=True)]
    engine_s = idle["fingerprints_s"] + idle["canaries_s"]
    result = {
        "cadence_s": arguments.cadence,
        "tokens_per_s": {"proven": proven, "bare": bare},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "idle_engine": idle,
        "share_of_engine_time": engine_s / arguments.cadence,
        "hardware": hardware("cpu"),
        "versions": versions(),
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    share = engine_s / arguments.cadence
    print(f"proof: {engine_s * 1e3:.0f} ms of the engine an update, {share:.2%} of {arguments.cadence:g} s")
    print(f"tokens/s with and without it: median ratio {result['ratio']['median']:.4f} over {len(ratios)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
