"""NCCL that moves bytes through queues of one process, for vLLM's communicator and its loops over CUDA streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

WAIT_S = 20.0


class Wire:
    """What one trainer and its workers share."""

    def __init__(self, workers: int) -> None:
        self.queues = [queue.Queue[torch.Tensor]() for _ in range(workers)]


class FakeCommunicator:
    """One side of a wire: rank 0 sends. A worker waits until something comes or the communicator is aborted."""

    def __init__(self, wire: Wire, rank: int, group: Any = None) -> None:
        self.wire, self.rank = wire, rank
        self.group = group  # which lives as long, as vLLM's does
        self.disabled = False
        self.broken = False  # moves nothing and says so to nobody, as vLLM's where NCCL does not load
        self.waits = False  # never gets rid of what it sends
        self.aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.rank == src:
            if self.waits:
                self._until(lambda: False)
            for line in self.wire.queues:
                line.put(tensor.clone())
            return
        line = self.wire.queues[self.rank - 1]
        self._until(lambda: not line.empty())
        if not self.aborted.is_set():
            tensor.copy_(line.get())

    def _until(self, ready: Callable[[], bool]) -> None:
        for _ in range(int(WAIT_S / 0.005)):
            if ready() or self.aborted.wait(0.005):
                return
        raise AssertionError("nobody gave a hanging broadcast up")

    def destroy(self) -> None:
        self.aborted.set()


def produce(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int,
    num_buffers: int,
) -> None:
    """vLLM's packed producer without CUDA streams."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    while (chunk := pack_tensors(iterator, post_iter_func, buffer_size_bytes)) is not None:
        group.broadcast(chunk.packed_tensor, src=src)


def consume(
    iterator: Iterator[tuple[str, tuple[list[int], torch.dtype]]],
    group: Any,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, torch.Tensor]]], None],
    buffer_size_bytes: int,
    num_buffers: int,
    device: Any,
) -> None:
    """vLLM's packed consumer without CUDA streams."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    rows = list(iterator)
    while rows:
        names, shapes, dtypes, sizes = [], [], [], []
        while rows and sum(sizes) <= buffer_size_bytes:
            name, (shape, dtype) = rows.pop(0)
            names.append(name)
            shapes.append(shape)
            dtypes.append(dtype)
            sizes.append(int(torch.Size(shape).numel()) * dtype.itemsize)
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast(packed, src=src)
        post_unpack_func(unpack_tensor(packed, names, shapes, dtypes, sizes))
