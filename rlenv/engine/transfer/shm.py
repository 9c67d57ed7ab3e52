"""The worker's end of the `shm` backend: a shared-memory file of weights goes in, a reloaded model comes out.

vLLM has no weight transfer between CPUs, hence this one. The model is reloaded by vLLM's own layerwise reload;
what that misses on CPUs, the packed copy of a tied lm_head, is packed again.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each update names its own file."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Where each tensor lies in the file at `path`: parallel lists, offsets in bytes."""

    path: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads checkpoint-format weights from shared memory into this worker's model."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """No rendezvous is needed."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(_read(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def repack(model: torch.nn.Module) -> None:
    """Pack again each layer that keeps both its weight and a packed copy of it (on CPUs, the lm_head).

    A layer reloaded under its own name was packed by the layerwise reload. A tied lm_head has no name of its
    own in the checkpoint, so its packed copy would stay the old one while its weight is new.
    """
    layers: Iterable[Any] = model.modules()
    for module in layers:
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.ndim == 2:
            module.quant_method.process_weights_after_loading(module)


def _read(info: SharedMemoryUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    descriptor = os.open(info.path, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for name, dtype_name, shape, offset in zip(info.names, info.dtype_names, info.shapes, info.offsets, strict=True):
        dtype = getattr(torch, dtype_name)
        count = math.prod(shape)
        yield name, torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
