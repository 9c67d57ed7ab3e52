"""CUDA IPC handles in plain types: vLLM's `ipc` backend, without pickles between its processes.

vLLM ships a handle as a tuple that holds classes and a dtype, which its message format carries only as a pickle
(VLLM_ALLOW_INSECURE_SERIALIZATION=1). Those three fields are the same for every weight or are a name, so the
trainer's end leaves them out (`plain_handles`) and the worker's end puts them back.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

# Positions in what torch's `reduce_tensor` returns for a CUDA tensor.
_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE = 0, 4, 5


class PlainIPCWeightTransferEngine(IPCWeightTransferEngine):
    """The worker's end: restores the handles and leaves the rest to vLLM's engine."""

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        handles: Any = update_info.ipc_handles
        update_info.ipc_handles = [{gpu: _restored(fields) for gpu, fields in by_gpu.items()} for by_gpu in handles]
        super().receive_weights(update_info)


def plain_handles(update_info: dict[str, Any]) -> dict[str, Any]:
    """`update_info` with each handle as a list of numbers, bytes and one dtype name."""
    handles = [{gpu: _plain(fields) for gpu, fields in by_gpu.items()} for by_gpu in update_info["ipc_handles"]]
    return {**update_info, "ipc_handles": handles}


def _plain(fields: tuple[Any, ...]) -> list[Any]:
    values = [list(field) if isinstance(field, torch.Size | tuple) else field for field in fields]
    values[_TENSOR_CLASS] = values[_STORAGE_CLASS] = None
    values[_DTYPE] = str(values[_DTYPE]).removeprefix("torch.")
    return values


def _restored(fields: list[Any]) -> tuple[Any, ...]:
    values: list[Any] = [_decoded(tuple(field) if isinstance(field, list) else field) for field in fields]
    values[_TENSOR_CLASS] = torch.Tensor
    values[_STORAGE_CLASS] = torch.storage.TypedStorage
    values[_DTYPE] = getattr(torch, values[_DTYPE])
    return tuple(values)


def _decoded(field: Any) -> Any:
    """Bytes that came through JSON, in base64; anything else as it is."""
    return base64.b64decode(field["base64"]) if isinstance(field, dict) else field
