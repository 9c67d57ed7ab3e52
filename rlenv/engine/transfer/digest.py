"""A tensor goes in, a fingerprint of its bits comes out, the same on every device.

The fingerprint is a polynomial over 64-bit integers, so that it neither rounds nor depends on the order of
summation: learner on one device and engine on another agree exactly, or the values differ.
"""

from __future__ import annotations

import functools

import torch

from rlenv.engine.base import TensorDigest

_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier, odd, below 2**63


def tensor_digest(tensor: torch.Tensor) -> TensorDigest:
    """Fingerprint `tensor` [any shape]; −0.0 counts as 0.0, since kernels do not keep its sign."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_floating_point():
        flat = flat + 0.0
    bits = flat.view(_INTEGERS[flat.element_size()])
    powers = _powers(str(tensor.device))
    value = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(_CHUNK):
        value = value * _MULTIPLIER + (chunk.to(torch.int64) * powers[: chunk.numel()]).sum()
    return TensorDigest(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        value=f"{int(value.item()) & (2**64 - 1):016x}",
    )


@functools.lru_cache(maxsize=4)
def _powers(device: str) -> torch.Tensor:
    """Odd multipliers, one a position; 64-bit products wrap alike on CPU and GPU."""
    position = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
    mixed = position * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 31)) * _MULTIPLIER
    return mixed | 1
