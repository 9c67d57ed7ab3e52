"""The ratio figures of one update enter; words leave when the policy that samples and the one that learns part ways.

A healthy run of the demo stays below a k3 of 0.004 nats, above an effective sample size of 0.99 and within 0.003 of a
mean ratio of 1, at two versions of staleness.
"""

from __future__ import annotations

from rlenv.agents.learner_types import RatioStats, StepMetrics

MAX_KL = 0.1
MIN_ESS = 0.8
MAX_RATIO_OFFSET = 0.1
FEWEST_TOKENS = 100  # below, figures are noise


def signs_of_collapse(metrics: StepMetrics) -> list[str]:
    """One sentence for each staleness bucket that is out of bounds, the freshest first."""
    told = []
    for bucket, stats in metrics.by_staleness.items():
        if stats.tokens >= FEWEST_TOKENS and (signs := _signs(stats)):
            told.append(f"staleness {bucket}: {', '.join(signs)} over {stats.tokens} tokens")
    return told


def _signs(stats: RatioStats) -> list[str]:
    signs = []
    if not stats.kl <= MAX_KL:
        signs.append(f"k3 KL {stats.kl:.2g} nats (limit {MAX_KL})")
    if not stats.ess >= MIN_ESS:
        signs.append(f"effective sample size {stats.ess:.2f} (limit {MIN_ESS})")
    if not abs(stats.ratio_mean - 1) <= MAX_RATIO_OFFSET:
        signs.append(f"mean ratio {stats.ratio_mean:.2f} (limit 1 ± {MAX_RATIO_OFFSET})")
    return signs
