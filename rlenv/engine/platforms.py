"""An accelerator goes in; how an engine must be started so that its tokens can be compared with another's comes out.

The rules are those of vLLM's asynchronous example (examples/rl/rlhf_async_new_apis.py). Those for ROCm were never run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlenv.errors import ConfigError

Platform = Literal["cpu", "cuda", "rocm"]
HOPPER = (9, 0)  # the first compute capability for which vLLM's batch-invariant kernels are made


@dataclass(frozen=True, slots=True)
class Rules:
    """Arguments and variables of an engine whose tokens do not depend on what else it computes.

    `bar` is the share of requests whose tokens have to equal those of a fresh engine.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    bar: float = 1.0


def current_platform() -> tuple[Platform, tuple[int, int] | None]:
    """What vLLM runs on here, and a GPU's compute capability."""
    from vllm.platforms import current_platform as platform

    if platform.is_rocm():
        return "rocm", None
    if not platform.is_cuda():
        return "cpu", None
    capability = platform.get_device_capability()
    return "cuda", None if capability is None else (capability.major, capability.minor)


def batch_invariance_on(device: str) -> Rules:
    """The rules of this machine's CPU or GPU."""
    return batch_invariance(*(("cpu", None) if device == "cpu" else current_platform()))


def batch_invariance(platform: Platform, capability: tuple[int, int] | None) -> Rules:
    """What `batch_invariant=True` means there. Raises ConfigError where it cannot be had.

    On NVIDIA GPUs each kernel gives a request the same bits in any batch; compiled layers do not, hence eager mode.
    ROCm has not all of those kernels: one request at a time without a prefix cache comes near; one in ten may differ.
    """
    if platform == "cpu":
        raise ConfigError("batch_invariant needs a GPU of compute capability 9.0: leave it out on a CPU")
    if platform == "rocm":
        return Rules(
            {
                "enforce_eager": True,
                "attention_backend": "TRITON_ATTN",
                "enable_prefix_caching": False,
                "max_num_seqs": 1,
            },
            {"VLLM_ROCM_USE_SKINNY_GEMM": "0"},
            bar=0.9,
        )
    if capability is None or capability < HOPPER:
        has = "an unknown one" if capability is None else f"{capability[0]}.{capability[1]}"
        raise ConfigError(
            "batch_invariant needs a GPU of compute capability 9.0 or higher (H100, H200, B200), and this one has "
            f"{has}: leave it out"
        )
    return Rules({"enforce_eager": True}, {"VLLM_BATCH_INVARIANT": "1"})
