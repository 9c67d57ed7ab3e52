"""Small trajectories, groups and models for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlenv.types import Failure, Group, Sample, Trajectory, VersionSpan


def trajectory(
    prompt: Sequence[int] = (5, 6),
    sampled: Sequence[int] = (7, 8),
    *,
    reward: float = 0.0,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    spans: Sequence[VersionSpan] | None = None,
    sample: Sample | None = None,
) -> Trajectory:
    """One turn: `sampled` follows `prompt`; log-probs are -1 unless given."""
    start, end = len(prompt), len(prompt) + len(sampled)
    return Trajectory(
        task="toy",
        seed=0,
        token_ids=(*prompt, *sampled),
        loss_mask=(False,) * start + (True,) * len(sampled),
        logprobs=(0.0,) * start + tuple(logprobs if logprobs is not None else [-1.0] * len(sampled)),
        spans=tuple(spans if spans is not None else [VersionSpan(str(version), start, end)]),
        messages=(),
        reward=reward,
        terminated=True,
        truncated=False,
        turns=1,
        info={"samples": (sample,)} if sample else {},
    )


def group(*trajectories: Trajectory, failures: int = 0) -> Group:
    return Group(
        id=0,
        task="toy",
        seed=0,
        trajectories=trajectories,
        failures=tuple(Failure("toy", 0, "TimeoutError", "too slow") for _ in range(failures)),
    )


def rewarded(*rewards: float, failures: int = 0) -> Group:
    return group(*(trajectory(reward=reward) for reward in rewards), failures=failures)


def tiny_model(vocab_size: int = 24, seed: int = 0, **config: Any) -> Any:
    """A random Qwen3 of about 30 k parameters in fp32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | config)))
