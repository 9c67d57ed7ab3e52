"""Kernels without a gradient enter; kernels of the same values leave, with the gradient of the same op in plain torch.

The letters of shapes are those of `rlenv.engine.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlenv.engine.kernels import Kernels, Rows


def with_gradients(kernels: Kernels) -> Kernels:
    """The same values; the gradient, once, is that of `torch_kernels` at the same inputs."""
    twins = torch_kernels(kernels.dtype)
    names = ("rms_norm", "add_rms_norm", "rotary", "attention", "silu_and_mul", "logprobs")
    pairs: dict[str, Any] = {name: partial(_Twin.apply, getattr(kernels, name), getattr(twins, name)) for name in names}
    linear, head = (partial(_Linear.apply, kernel) for kernel in (kernels.linear, kernels.head))
    return replace(kernels, linear=linear, head=head, **pairs)


def torch_kernels(dtype: torch.dtype) -> Kernels:
    """Every op in plain torch: differentiable, on any device, and only about the engine's values."""
    return Kernels(
        dtype=dtype,
        cos_sin=partial(_cos_sin, dtype),
        linear=F.linear,
        rms_norm=_rms_norm,
        add_rms_norm=_add_rms_norm,
        rotary=_rotary,
        attention=_attention,
        silu_and_mul=_silu_and_mul,
        head=_head,
        logprobs=_logprobs,
    )


class _Twin(torch.autograd.Function):
    """`kernel` forwards; backwards the twin is computed again, as no kernel says what it had in between."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], twin: Callable[..., Any], *arguments: Any) -> Any:
        ctx.twin = twin
        ctx.others = [None if isinstance(argument, Tensor) else argument for argument in arguments]
        ctx.save_for_backward(*(argument for argument in arguments if isinstance(argument, Tensor)))
        return kernel(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[2:]
        arguments = [
            next(saved).detach().requires_grad_(need) if other is None else other
            for other, need in zip(ctx.others, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.twin(*arguments)
        wanted = [argument for argument, need in zip(arguments, needed, strict=True) if need]
        found = iter(torch.autograd.grad(outputs, wanted, gradients))
        return None, None, *(next(found) if need else None for need in needed)


class _Linear(torch.autograd.Function):
    """x [N, i], weight [o, i], bias [o] → [N, o]. The gradient is computed in the dtype of the result's."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return kernel(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            None,
            (gradient @ weight.to(gradient.dtype)).to(x.dtype) if to_x else None,
            (gradient.t() @ x.to(gradient.dtype)).to(weight.dtype) if to_weight else None,
            gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if to_bias else None,
        )


def _cos_sin(dtype: torch.dtype, config: Any, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        rotary = LlamaRotaryEmbedding(config).to(device)  # reads the config alone, and so serves Qwen3 too
        positions = torch.arange(config.max_position_embeddings, device=device)[None]
        halves = [table[0].chunk(2, -1)[0] for table in rotary(torch.empty(0, device=device), positions)]
        return torch.cat(halves, -1).to(dtype)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return (exact * scale * weight.float()).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, epsilon), total


def _rotary(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = table[positions][:, None].chunk(2, -1)  # [N, 1, D / 2] each
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.view(len(x), -1, 2 * cos.shape[-1]).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).view(x.shape)


def _attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    # Padding is on the right, where no token of a causal row looks.
    query, key, value = (rows.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return rows.pack(attended.transpose(1, 2))


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _logprobs(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    return (logits / temperatures[:, None]).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
