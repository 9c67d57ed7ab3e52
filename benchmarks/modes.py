"""What each request in flight does when weights are swapped, by pause mode and by cache: the measured table.

    python -m benchmarks.modes --out modes.json

Eight requests for 200 tokens are under way when an update begins, and one more is submitted while the engine is
paused. `stale` counts tokens that new weights sampled over keys and values which old weights had computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.faults import perturb
from rlenv.agents.hardware import hardware, versions
from rlenv.engine.base import Manifest, PauseMode, WeightSyncClient
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.vllm import VLLMEngine
from rlenv.models import default_model
from rlenv.types import Completion, Sample

REQUESTS, TOKENS, BEGUN = 8, 200, 20
LONG = Sample(max_tokens=TOKENS, ignore_eos=True)
PROMPT = [9, 8, 7]
LATE = {0: "the new", -1: "the old"}


@dataclass(frozen=True)
class Row:
    """One mode. Tokens are totals over the eight requests; `late` is the request submitted during the pause."""

    mode: str
    clear_cache: bool
    finished: int
    aborted: int
    old_tokens: int
    new_tokens: int
    stale_tokens: int
    late_version: int
    late_finish: str
    pause_s: float


class _LateSender(ModelSender):
    """Submits one more request once the engine is paused."""

    def __init__(self, model: Any, engine: VLLMEngine) -> None:
        super().__init__(model, backend=engine.transport, dtype=engine.dtype)
        self._engine = engine

    def send(self, client: WeightSyncClient) -> Manifest:
        start = client.start_weight_update

        def start_and_submit() -> None:
            start()
            self.late = self._engine.submit(PROMPT, LONG)

        client.start_weight_update = start_and_submit  # type: ignore[method-assign]
        return super().send(client)


async def measure(engine: VLLMEngine, model: Any, mode: PauseMode, clear_cache: bool) -> Row:
    """One update in `mode`, eight requests in flight."""
    version = engine.weight_version + 1
    sender = _LateSender(model, engine)
    perturb(model, seed=version)
    flying = [asyncio.create_task(engine.generate([*PROMPT, i], LONG)) for i in range(REQUESTS)]
    while min(engine.progress().values(), default=0) < BEGUN or engine.in_flight < REQUESTS:  # noqa: ASYNC110 - a count
        await asyncio.sleep(0.002)
    report = await engine.update_weights(sender, version, mode=mode, clear_cache=clear_cache)
    completions = await asyncio.gather(*flying)
    late = await asyncio.wrap_future(sender.late)
    return Row(
        mode=mode,
        clear_cache=clear_cache,
        finished=sum(completion.finish_reason == "length" for completion in completions),
        aborted=sum(completion.finish_reason == "abort" for completion in completions),
        old_tokens=_tokens(completions, version - 1),
        new_tokens=_tokens(completions, version),
        stale_tokens=sum(s.end - s.start for c in completions for s in c.spans if s.stale_context),
        late_version=late.spans[0].version - version,
        late_finish=late.finish_reason,
        pause_s=report.pause_s,
    )


async def measure_all(engine: VLLMEngine, model: Any) -> list[Row]:
    """Every mode with and without clearing the cache."""
    return [await measure(engine, model, mode, clear) for mode in get_args(PauseMode) for clear in (True, False)]


def table(rows: Sequence[Row]) -> str:
    """The table, as Markdown."""
    lines = [
        "| mode | cache | finished | aborted | old tokens | new tokens | of them stale | sent during the pause |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cache = "cleared" if row.clear_cache else "kept"
        lines.append(
            f"| {row.mode} | {cache} | {row.finished} of {REQUESTS} | {row.aborted} of {REQUESTS} | {row.old_tokens} "
            f"| {row.new_tokens} | {row.stale_tokens} | {row.late_finish}, on {LATE[row.late_version]} weights |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="benchmarks.modes", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="where the JSON goes")
    arguments = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    with VLLMEngine(default_model(), device="cpu", max_model_len=256) as engine:
        rows = asyncio.run(measure_all(engine, model))
    result = {"rows": [asdict(row) for row in rows], "hardware": hardware("cpu"), "versions": versions()}
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows))
    return 0


def _tokens(completions: Sequence[Completion], version: int) -> int:
    return sum(span.end - span.start for c in completions for span in c.spans if span.version == version)


if __name__ == "__main__":
    sys.exit(main())
