"""Settings on which an engine's log-probs depend go in, arguments of vLLM come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlenv.engine.base import HeadDtype

MIN_BATCHED_TOKENS = 8192  # of one engine step; vLLM's own default for a CPU, 2048, is a third slower


@dataclass(frozen=True, slots=True)
class Backend:
    """What log-probs depend on beside weights and ids. The defaults are right for training, the rest is to be measured.

    `rlenv audit` says what each mistake costs. None leaves the choice to vLLM, but for chunked prefill on a CPU: a
    prompt computed in parts ends vLLM there when its request has a seed, as CPU generators cannot be set back.
    """

    logprobs: Literal["processed", "raw"] = "processed"
    """Of the distribution that was sampled from, or of the model's before temperature, top-p and top-k."""
    head: HeadDtype = "float32"
    """Precision of the output head; the learner's must be the same."""
    salted: bool = True
    """Keep prefix-cache blocks of different weights apart."""
    proof: bool = True
    """Prove each weight update by fingerprints and canaries."""
    prefix_cache: bool = True
    """Reuse keys and values of prompts that begin alike."""
    async_scheduling: bool | None = None
    """Schedule a step while the one before it computes."""
    chunked_prefill: bool | None = None
    """Compute long prompts in parts."""

    def arguments(self, device: str, dtype: str, max_model_len: int) -> dict[str, Any]:
        """What vLLM's `AsyncEngineArgs` is told."""
        chunked = device != "cpu" if self.chunked_prefill is None else self.chunked_prefill
        arguments: dict[str, Any] = {
            "logprobs_mode": f"{self.logprobs}_logprobs",
            "hf_overrides": {} if self.head == dtype else {"head_dtype": self.head},
            "enable_prefix_caching": self.prefix_cache,
            "async_scheduling": self.async_scheduling,
            "enable_chunked_prefill": chunked,
        }
        if not chunked:
            arguments["max_num_batched_tokens"] = max(MIN_BATCHED_TOKENS, max_model_len)
        return arguments
