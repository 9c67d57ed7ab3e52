"""vLLM calls `register` in each of its processes; afterwards our weight-transfer backends exist there.

vLLM swallows an error raised here and lets `VLLM_PLUGINS` filter entry points, so `VLLMEngine` probes at start
whether the backend arrived.
"""

from __future__ import annotations

SHARED_MEMORY = "shm"
IPC = "rlenv_ipc"
_BACKENDS = {
    SHARED_MEMORY: ("rlenv.engine.transfer.shm", "SharedMemoryWeightTransferEngine"),
    IPC: ("rlenv.engine.transfer.ipc", "PlainIPCWeightTransferEngine"),
}


def register() -> None:
    """Make our backends known to vLLM's factory; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, engine) in _BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
