"""How small an error of one tensor shows: a model goes in, the least relative error that each part of the proof sees
comes out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch

from rlenv.engine.transfer.plugin import SHARED_MEMORY
from rlenv.engine.transfer.proof import MAX_ABS_FP32, MEAN_ABS_HALF, canary_prompt
from rlenv.engine.transfer.sender import ModelSender

CANARY_IDS = 144
LEAST = 1e-9  # no float32 weight can be so little off


def fingerprint_limit(dtype: torch.dtype) -> float:
    """A fingerprint sees one flipped bit of any weight; its size is the dtype's spacing at 1."""
    return torch.finfo(dtype).eps


def canary_limits(model: Any, dtype: torch.dtype, names: Iterable[str]) -> dict[str, float]:
    """By tensor: the least relative noise on each of its weights at which the canaries' verdict turns, by halving.

    Above 1 not even noise as large as the weights is seen.
    """
    model = copy.deepcopy(model).to(dtype)
    ids = [canary_prompt(model.config.vocab_size, CANARY_IDS)]
    sender = ModelSender(model, backend=SHARED_MEMORY, dtype=str(dtype).removeprefix("torch."))
    right = torch.tensor(sender.logprobs(ids)[0])
    limits = {}
    for name in names:
        parameter = model.get_parameter(name)
        whole = parameter.detach().clone()
        noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        size = 1.0
        while size > LEAST:
            parameter.data.copy_(whole * (1 + size * noise))
            gap = (torch.tensor(sender.logprobs(ids)[0]) - right).abs()
            caught = gap.max() > MAX_ABS_FP32 if dtype == torch.float32 else gap.mean() > MEAN_ABS_HALF
            if not caught:
                break
            size /= 2
        limits[name] = size * 2
        parameter.data.copy_(whole)
    return limits


def representatives(model: torch.nn.Module) -> list[str]:
    """One tensor of each kind: of those that differ in a layer's number alone, the one in the middle."""
    kinds: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [names[len(names) // 2] for names in kinds.values()]
