"""Log-probs of the same sampled ids by engine and learner enter; the usual figures of how far they are apart leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlenv.agents.corrections import LOG_RATIO_LIMIT
from rlenv.agents.learner_types import LossConfig
from rlenv.agents.packing import FloatArray

# What numerics alone explain. In fp32 single tokens are judged. In bf16 they differ by up to 0.6 nats and the mean
# of many is judged: k3 is 1e-3 with fp32 heads on both sides, 2e-3 with bf16 heads (SmolLM2-135M on an H200).
MAX_ABS_FP32 = 1e-4
MAX_KL_HALF = 1e-2


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Engine and learner on `tokens` sampled ids, at weights that ought to be the same. Log-probs are in nats.

    `offset` is the mean of engine − learner, `abs_mean` and `abs_max` are of its size. With r = exp(learner − engine):
    `ratio_mean` of r; `kl`, the mean of r − 1 − log r (k3 of http://joschu.net/blog/kl-approx.html); `clip_fraction`,
    the share of r outside the loss's clip range; `ess`, the effective sample size (Σr)² / (n Σr²), 1 at best.
    `entropy`, the mean of −engine, estimates that of the sampling distribution.
    """

    tokens: int
    offset: float
    abs_mean: float
    abs_max: float
    ratio_mean: float
    kl: float
    clip_fraction: float
    ess: float
    entropy: float

    def within(self, dtype: str) -> bool:
        """Whether the numerics of `dtype` explain it."""
        return self.abs_max <= MAX_ABS_FP32 if dtype == "float32" else self.kl <= MAX_KL_HALF


def measure(engine: FloatArray, learner: FloatArray) -> Mismatch:
    """Compare log-probs [L] of the same ids. A learner's −inf or NaN counts as the largest log-ratio there is.

    Raises ValueError when there is no id to compare.
    """
    if not len(engine):
        raise ValueError("no sampled id to compare engine and learner on")
    engine, learner = engine.astype(np.float64), learner.astype(np.float64)
    difference = np.nan_to_num(learner - engine, nan=-np.inf).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = np.exp(difference)
    loss = LossConfig()
    outside = (ratio < 1 - loss.clip_low) | (ratio > 1 + loss.clip_high)
    return Mismatch(
        tokens=len(engine),
        offset=float(-difference.mean()),
        abs_mean=float(np.abs(difference).mean()),
        abs_max=float(np.abs(difference).max()),
        ratio_mean=float(ratio.mean()),
        kl=float((ratio - 1 - difference).mean()),
        clip_fraction=float(outside.mean()),
        ess=float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        entropy=float(-engine.mean()),
    )
