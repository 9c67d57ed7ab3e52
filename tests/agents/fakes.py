"""A learner without a model, for tests of what stands around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rlenv.agents.learner_types import Scoring, StepMetrics
from rlenv.agents.packing import Batch, FloatArray
from rlenv.engine.base import Manifest, TensorDigest, WeightSyncClient
from rlenv.errors import LearnerError


class FakeLearner:
    """Takes `seconds` for a step and remembers each batch; `fails_at` names a step that raises; may be `dead`.

    Its log-probs are those of the scripted engine, `off` by so much.
    """

    off = 0.0
    scoring = Scoring()

    def __init__(self, seconds: float = 0.0, fails_at: int = 0) -> None:
        self.seconds, self.fails_at, self.dead = seconds, fails_at, False
        self.batches: list[Batch] = []

    async def step(self, batch: Batch) -> StepMetrics:
        await asyncio.sleep(self.seconds)
        self.batches.append(batch)
        if len(self.batches) == self.fails_at:
            raise LearnerError("the learner's process died")
        return StepMetrics(
            version=batch.version + 1,
            loss=0.0,
            grad_norm=1.0,
            lr=1e-3,
            rows=batch.rows,
            tokens=batch.live_tokens,
            entropy=1.0,
            clip_fraction=0.0,
            frac_zero_std=batch.zero_std_fraction,
            fresh=None,
            stale=None,
            by_staleness={},
            seconds=self.seconds,
        )

    async def score(self, batch: Batch, scoring: Scoring | None = None) -> FloatArray:
        await asyncio.sleep(0)
        return batch.behaviour[batch.live] - self.off

    def check(self) -> None:
        if self.dead:
            raise LearnerError("the learner's process died")

    def send(self, client: WeightSyncClient) -> Manifest:
        client.start_weight_update()
        return {"w": TensorDigest("float32", (1,), "0")}

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(ids) - 1) for ids in sequences]

    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
