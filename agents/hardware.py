"""What a measurement ran on, for its JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def hardware(device: str) -> str:
    """`"1 × NVIDIA H200"` or `"2 cores of AMD EPYC …"`."""
    if device == "cuda":
        import torch

        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return f"{len(os.sched_getaffinity(0))} cores of {_processor()}"


def versions() -> dict[str, str]:
    """Versions of what decides the figures."""
    import torch
    import transformers
    import vllm

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": vllm.__version__,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
