"""vLLM calls `register` in each of its processes; afterwards the `shm` weight-transfer backend exists there.

vLLM swallows an error raised here and lets `VLLM_PLUGINS` filter entry points, so `VLLMEngine` probes at start
whether the backend arrived.
"""

from __future__ import annotations

BACKEND = "shm"


def register() -> None:
    """Make `shm` known to vLLM's factory; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlenv.engine.transfer.shm", "SharedMemoryWeightTransferEngine"
        )
