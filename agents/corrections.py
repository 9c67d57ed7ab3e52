"""Log-probs of three policies enter; truncated importance weights and off-policy statistics leave.

Behaviour is the engine's log-prob of a sampled id, old the learner's at the start of the update, current
the learner's now. All are fp32 and flat over live tokens [L].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlenv.agents.learner_types import RatioStats

BUCKETS = ("0", "1", "2", "3", "4+", "stale_context")
LOG_RATIO_LIMIT = 20.0  # e^20 = 5e8: far outside any trust region, and its square is still finite
COLUMNS = 7  # tokens, ratio, ratio², k3, |log ratio|, clipped, entropy


def truncated_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """min(exp(log_ratio), cap) whose gradient is its value times that of log_ratio, above the cap, too. [L] → [L]

    `torch.clamp` would give no gradient above the cap: the token would be dropped, not down-weighted. The
    excess is taken off inside the exponent, so that nothing overflows on the way.
    """
    bounded = log_ratio.clamp(min=-LOG_RATIO_LIMIT)
    return torch.exp(bounded - (bounded - min(math.log(cap), LOG_RATIO_LIMIT)).clamp(min=0).detach())


def tis_weights(old: Tensor, behaviour: Tensor, stale: Tensor, cap: float) -> Tensor:
    """min(exp(old − behaviour), cap) on stale tokens, 1 on the others, without gradient. [L] → [L]

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl). On fresh tokens old and
    behaviour are the same weights, and what they differ by is numerics: to be mended, not weighted.
    """
    return torch.where(stale, truncated_ratio(old - behaviour, cap), 1.0).detach()


def buckets(staleness: Tensor, stale_context: Tensor) -> Tensor:
    """The index into BUCKETS of each token. [L] → [L]"""
    oldest = BUCKETS.index("4+")
    fresh_on_stale = stale_context & (staleness == 0)
    return torch.where(fresh_on_stale, BUCKETS.index("stale_context"), staleness.clamp(max=oldest))


class RatioTable:
    """Sums per staleness bucket, added up over micro-batches and (by plain addition) over ranks.

    `sums` [len(BUCKETS), COLUMNS] in fp64 adds over ranks, `peaks` [len(BUCKETS)] takes their maximum.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(BUCKETS), COLUMNS, dtype=torch.float64, device=device)
        self.peaks = torch.zeros(len(BUCKETS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, bucket: Tensor, log_ratio: Tensor, clipped: Tensor, entropy: Tensor) -> None:
        """Count one micro-batch; all arguments are [L], `log_ratio` is old − behaviour."""
        size = log_ratio.abs().to(self.sums.dtype)
        bounded = log_ratio.to(self.sums.dtype).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = bounded.exp()
        columns = (torch.ones_like(ratio), ratio, ratio**2, ratio - 1 - bounded, size, clipped, entropy)
        self.sums.index_add_(0, bucket, torch.stack([column.to(self.sums.dtype) for column in columns], dim=1))
        self.peaks.scatter_reduce_(0, bucket, size, reduce="amax")

    def of(self, *names: str) -> RatioStats | None:
        """The statistics over these buckets together; None without a token."""
        rows = [BUCKETS.index(name) for name in names]
        tokens, ratio, square, kl, size, clipped, _ = self.sums[rows].sum(0).tolist()
        if not tokens:
            return None
        return RatioStats(
            tokens=int(tokens),
            ratio_mean=ratio / tokens,
            kl=kl / tokens,
            ess=ratio**2 / (tokens * square),
            abs_mean=size / tokens,
            abs_max=self.peaks[rows].max().item(),
            clip_fraction=clipped / tokens,
        )

    def by_staleness(self) -> dict[str, RatioStats]:
        """The statistics of each bucket that has tokens."""
        return {name: stats for name in BUCKETS if (stats := self.of(name))}

    def entropy(self) -> float:
        """The mean over all tokens, in nats."""
        return (self.sums[:, -1].sum() / self.sums[:, 0].sum()).item()
