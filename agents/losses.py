"""Log-probs and advantages of live tokens enter; the sum of their losses leaves, and which of them were clipped.

Masked tokens never enter: they are left out by selection, as 0 × inf would still be NaN. The caller divides
by the live tokens of the whole batch (the token-level mean of DAPO, arXiv 2503.14476), whatever the split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlenv.agents.corrections import LOG_RATIO_LIMIT, tis_weights, truncated_ratio
from rlenv.agents.learner_types import LossConfig


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """`total`, the sum over live tokens [], and `clipped` [L]: the clip left this token without gradient."""

    total: Tensor
    clipped: Tensor


def one_step_loss(
    current: Tensor, behaviour: Tensor, advantages: Tensor, stale: Tensor, config: LossConfig
) -> TokenLosses:
    """The loss of an update of one optimizer step: the clip acts on the ratio to *behaviour*. All [L].

    Current and old are the same weights here, so that a clip on their ratio, 1, would be idle. Instead

    - stale tokens: ratio r = exp(current − behaviour), truncated at `weight_cap` (beyond it the token keeps
      the gradient of weight cap), and clipped to [1 − clip_low, 1 + clip_high]: no gradient where the policy
      has already moved past the range in the direction of the advantage. The cap is thus felt where the
      advantage is negative, or the clip is wider than it;
    - fresh tokens: ratio 1, the plain policy gradient. Their difference to behaviour is the mismatch of
      backends, which is measured and never corrected.
    """
    anchor = torch.where(stale, behaviour, current.detach())
    return _surrogate(truncated_ratio(current - anchor, config.weight_cap), advantages, config)


def multi_step_loss(
    current: Tensor, old: Tensor, behaviour: Tensor, advantages: Tensor, stale: Tensor, config: LossConfig
) -> TokenLosses:
    """The loss of an update of several optimizer steps: the clip acts on current against *old*. All [L].

    `old` was computed by the learner at the start of the update, for every token. The surrogate of
    r = exp(current − old), clipped to [1 − clip_low, 1 + clip_high], is weighted on stale tokens by
    min(exp(old − behaviour), weight_cap), a constant without gradient (the decoupled objective of
    arXiv 2505.24298, with truncated weights). Fresh tokens weigh 1.
    """
    weights = tis_weights(old, behaviour, stale, config.weight_cap)
    ratio = torch.exp((current - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return _surrogate(ratio, advantages, config, weights)


def _surrogate(ratio: Tensor, advantages: Tensor, config: LossConfig, weights: Tensor | float = 1.0) -> TokenLosses:
    """PPO's pessimistic surrogate (arXiv 1707.06347, equation 7)."""
    kept = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return TokenLosses(total=-(torch.minimum(kept, bounded) * weights).sum(), clipped=(bounded < kept).detach())
