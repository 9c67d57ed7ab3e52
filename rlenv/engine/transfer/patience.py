"""The size of a model goes in; how long it may take to go from learner to engine comes out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

SEND_DEADLINE_S = 5.0  # for one model to go over, and
SLOWEST_BYTES_PER_S = 1e9  # for each of its bytes; 2e10 were measured between two H200


def transfer_deadline_s(count: int) -> float:
    """After how many seconds the transfer of `count` bytes is given up."""
    return SEND_DEADLINE_S + count / SLOWEST_BYTES_PER_S


def size_of(tensors: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Bytes of tensors, by dtype ("bfloat16") and shape."""
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in tensors)
