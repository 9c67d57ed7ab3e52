"""Hundreds of pause–update–resume cycles under load: nothing lost, nothing aborted, memory flat.

    python -m benchmarks.soak --cycles 500 --out soak.json

64 requests are in flight throughout; each that ends is checked and followed by the next. Every cycle moves the
weights, swaps them in mid-generation and proves them. Memory is the resident size of this process and all below it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import is_proven, perturb
from rlenv.agents.hardware import hardware, versions
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.vllm import VLLMEngine
from rlenv.models import default_model
from rlenv.types import Sample

CONCURRENT = 64
PAUSE_BETWEEN_S = 0.1
CYCLE_LIMIT_S = 10.0
GROWTH_LIMIT = 0.02  # of the resident size, last fifth of the cycles against the second


@dataclass
class Soak:
    """What is counted along the way."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    swapped: int = 0
    cycles_s: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)
    resident_mib: list[dict[str, float]] = field(default_factory=list)


async def soak(engine: VLLMEngine, model: Any, cycles: int) -> Soak:
    """Swap `cycles` times under `CONCURRENT` requests."""
    seen, stop = Soak(), asyncio.Event()
    sender = ModelSender(model, backend=engine.transport, dtype=engine.dtype)
    # The key-value cache is resident once it is written to: zero it all, so that its use does not look like a leak.
    await asyncio.wrap_future(engine.start(engine.rpc("rlenv_recover")))
    clients = [asyncio.create_task(_client(engine, i, seen, stop)) for i in range(CONCURRENT)]
    for _ in range(cycles):
        version = engine.weight_version + 1
        perturb(model, seed=version, size=1e-4)
        begun = time.perf_counter()
        report = await engine.update_weights(sender, version)
        seen.cycles_s.append(time.perf_counter() - begun)
        seen.mismatches.append(report.mismatch_max)
        seen.resident_mib.append(_resident_mib())
        await asyncio.sleep(PAUSE_BETWEEN_S)
    stop.set()
    await asyncio.gather(*clients)
    return seen


async def _client(engine: VLLMEngine, number: int, seen: Soak, stop: asyncio.Event) -> None:
    sample = Sample(max_tokens=40 + number, ignore_eos=True)
    while not stop.is_set():
        completion = await engine.generate([9, 8, 7, number], sample)
        whole = completion.finish_reason == "length" and len(completion.token_ids) == sample.max_tokens
        proven = await is_proven(engine, completion)
        seen.outcomes["proven" if whole and proven else completion.finish_reason if not whole else "unproven"] += 1
        seen.tokens += len(completion.token_ids)
        seen.swapped += len(completion.spans) > 1


def summarise(seen: Soak) -> dict[str, Any]:
    fifth = max(len(seen.resident_mib) // 5, 1)
    early, late = _typical(seen.resident_mib[fifth : 2 * fifth]), _typical(seen.resident_mib[-fifth:])
    growth = sum(late.values()) / sum(early.values()) - 1
    return {
        "cycles": len(seen.cycles_s),
        "requests": dict(seen.outcomes),
        "requests_swapped_in_mid_generation": seen.swapped,
        "tokens": seen.tokens,
        "cycle_s": {"median": statistics.median(seen.cycles_s), "max": max(seen.cycles_s)},
        "mismatch_max": max(seen.mismatches),
        "resident_mib": {"second_fifth": early, "last_fifth": late, "growth": growth},
        "passed": set(seen.outcomes) == {"proven"} and max(seen.cycles_s) <= CYCLE_LIMIT_S and growth <= GROWTH_LIMIT,
    }


def main(argv: Sequence[str] | None = None) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--out", help="where the JSON goes")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    with VLLMEngine(default_model(), device="cpu", max_model_len=256) as engine:
        seen = asyncio.run(soak(engine, model, arguments.cycles))
    result = {**summarise(seen), "hardware": hardware("cpu"), "versions": versions()}
    text = json.dumps(result, indent=2)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")
    print(text)
    print("PASS" if result["passed"] else "FAIL")
    return 0 if result["passed"] else 1


def _typical(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def _resident_mib() -> dict[str, float]:
    """By process: this one and its descendants; memory that they share counts in each."""
    import psutil

    family = (psutil.Process(), *psutil.Process().children(recursive=True))
    return {f"{number} {process.name()}": process.memory_info().rss / 2**20 for number, process in enumerate(family)}


if __name__ == "__main__":
    sys.exit(main())
