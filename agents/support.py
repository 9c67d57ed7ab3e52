"""Logits and the top-k and top-p they were sampled with enter; logits of the ids that could be drawn leave.

The rule is vLLM's (`vllm.v1.sample.ops.topk_topp_sampler`): top-k first, ties at the k-th place stay; then, of what is
left, the least likely ids whose probabilities add up to at most 1 − top_p go, and the likeliest always stays.
"""

from __future__ import annotations

import torch
from torch import Tensor


def restrict(logits: Tensor, top_p: Tensor, top_k: Tensor, sampled: Tensor) -> Tensor:
    """`logits` [C, V] after temperature, −inf where an id could not be drawn; `top_p`, `top_k`, `sampled` are [C].

    A `top_k` of 0 and a `top_p` of 1 leave all ids. The `sampled` id always stays: it was drawn, so that where
    rounding puts it just outside, the engine had it just inside.
    """
    if bool((top_p >= 1).all()) and bool((top_k <= 0).all()):
        return logits
    with torch.no_grad():
        banned = _banned(logits, top_p, top_k).scatter(-1, sampled[:, None], False)
    return logits.masked_fill(banned, -torch.inf)


def _banned(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    ascending, order = logits.sort(dim=-1)  # [C, V]
    size = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, size).long().clamp(max=size)
    kth = ascending.gather(-1, (size - k)[:, None])
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    below = ascending.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
    below[:, -1] = False
    gone = ascending.isneginf() | (below & (top_p < 1)[:, None])
    return torch.zeros_like(gone).scatter(-1, order, gone)
