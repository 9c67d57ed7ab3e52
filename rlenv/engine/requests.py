"""One request to vLLM and its answer, as every vLLM engine of ours phrases them: a Sample in, spans of versions out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlenv.errors import EngineError
from rlenv.types import FinishReason, Sample, VersionSpan


def sampling_fields(sample: Sample, room: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams, where `room` ids are left in the context; only sampled log-probs come back."""
    return {
        "temperature": sample.temperature,
        "top_p": sample.top_p,
        "top_k": sample.top_k,
        "max_tokens": min(sample.max_tokens or room, room),
        "min_tokens": sample.min_tokens,
        "stop": list(sample.stop),
        "stop_token_ids": [] if sample.ignore_eos else list(end_ids),
        "seed": sample.seed,
        "ignore_eos": sample.ignore_eos,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": bool(sample.stop),
    }


def canary_fields() -> dict[str, Any]:
    """The same for a canary: one token after its prompt is decoded, whatever it is."""
    return {"temperature": 1.0, "seed": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def canary_length(block: int, max_model_len: int) -> int:
    """Ids of a canary's prompt: more than one block of the prefix cache, so that a cached one is met."""
    return max(2, min(block + 16, max_model_len - 2))


def version_spans(
    served: Iterable[tuple[str, int, int]], submitted: str, cleared: Mapping[str, bool]
) -> tuple[VersionSpan, ...]:
    """Spans `(label, start, end)` of a request that was submitted under the label `submitted`."""
    return tuple(
        VersionSpan(label, start, end, stale_context=label != submitted and not cleared[label])
        for label, start, end in served
        if end > start
    )


def finish_reason(reason: str | None) -> FinishReason:
    """Raises EngineError for an end that is no answer."""
    if reason in ("stop", "length", "abort"):
        return reason  # type: ignore[return-value]
    raise EngineError(f"vLLM ended a request with {reason!r}")
