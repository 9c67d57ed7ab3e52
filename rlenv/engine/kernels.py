"""Tensors of packed tokens enter an op of vLLM's model; what the engine would compute from them leaves, bit for bit.

These are the ops that vLLM runs for Llama and Qwen3 on a Hopper GPU under VLLM_BATCH_INVARIANT=1, eagerly and in
bf16. There a row of a result depends on that row alone, however many others are computed beside it. One thing is
left: FlashAttention 3 takes other tiles for one query than for several, so that behind the 128th position a token
that was decoded over a cache has other bits than one that was prefilled. `Rows` says which is which.

Legend: N tokens of all rows laid end to end, B rows, T the longest, D head size, Q query heads, K key-value heads,
V vocabulary, P positions; [i, o] are a layer's inputs and outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlenv.errors import ConfigError

PAGE = 16  # positions of one block of vLLM's key-value cache


@dataclass(frozen=True)
class Rows:
    """Which cells of a right-padded batch are tokens: `mask` [B, T]. What is packed holds those alone, in order.

    `decoded` [B, T] are the tokens that the engine took in one by one: those that it had sampled itself.
    """

    mask: Tensor
    decoded: Tensor

    @property
    def longest(self) -> int:
        return self.mask.shape[1]

    @cached_property
    def lengths(self) -> Tensor:
        """int32 [B]"""
        return self.mask.sum(1, dtype=torch.int32)

    @cached_property
    def starts(self) -> Tensor:
        """Row b is tokens `starts[b] : starts[b + 1]`: int32 [B + 1]"""
        return F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def cells(self) -> Tensor:
        """Where each token lies among all B × T cells: int64 [N]"""
        return self.mask.flatten().nonzero()[:, 0]

    @cached_property
    def positions(self) -> Tensor:
        """int64 [N]"""
        return self.cells % self.longest

    @cached_property
    def singles(self) -> Tensor:
        """The decoded ones among the tokens: int64 [D]"""
        return self.pack(self.decoded).nonzero()[:, 0]

    def pack(self, padded: Tensor) -> Tensor:
        """[B, T, …] → [N, …]"""
        return padded.flatten(0, 1)[self.cells]

    def pad(self, packed: Tensor) -> Tensor:
        """[N, …] → [B, T, …], zeros on padding"""
        empty = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        return empty.index_copy(0, self.cells, packed).view(*self.mask.shape, *packed.shape[1:])


@dataclass(frozen=True)
class Kernels:
    """One function for each op of a Llama or Qwen3; activations are of `dtype`. None of them changes its inputs."""

    dtype: torch.dtype
    cos_sin: Callable[[Any, torch.device], Tensor]  # transformers' config → the rotary table [P, D]: cos, then sin
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [N, i], weight [o, i], bias [o] → [N, o]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x […, i], weight [i], epsilon → […, i]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # x, residual → normed sum, sum
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # positions, q [N, Q·D], k, table → q, k
    attention: Callable[[Tensor, Tensor, Tensor, Rows], Tensor]  # q [N, Q, D], k [N, K, D], v → causal [N, Q, D]
    silu_and_mul: Callable[[Tensor], Tensor]  # gate beside up [N, 2i] → silu(gate) · up [N, i]
    head: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # hidden [N, i], fp32 weight [V, i], bias → fp32 [N, V]
    logprobs: Callable[[Tensor, Tensor, Tensor], Tensor]  # fp32 logits [N, V], ids [N], temperatures [N] → [N]


def vllm_kernels() -> Kernels:
    """vLLM's own. This process is in vLLM's batch-invariant mode from then on, which must precede its first matmul.

    Raises ConfigError where they cannot run.
    """
    _check_gpu()
    # The compiled norm and cuBLAS's choice of algorithms read the environment, once.
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    try:
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance, linear_batch_invariant
        from vllm.vllm_flash_attn import is_fa_version_supported
    except ImportError as error:
        raise ConfigError(f"engine ops need vLLM 0.32 with its GPU kernels beside the learner: {error}") from error
    if not is_fa_version_supported(3):
        raise ConfigError("engine ops need FlashAttention 3, which this build of vLLM lacks: leave engine_ops out")
    init_batch_invariance()
    return Kernels(
        dtype=torch.bfloat16,
        cos_sin=_cos_sin,
        linear=linear_batch_invariant,
        rms_norm=_rms_norm,
        add_rms_norm=_add_rms_norm,
        rotary=_rotary,
        attention=_attention,
        silu_and_mul=_silu_and_mul,
        head=_head,
        logprobs=_logprobs,
    )


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise ConfigError("engine ops need an NVIDIA GPU and none is visible: leave engine_ops out")
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        raise ConfigError(
            "engine ops need a GPU of compute capability 9.0 (H100, H200), for FlashAttention 3; this one has "
            f"{capability[0]}.{capability[1]}: leave engine_ops out"
        )


def _cos_sin(config: Any, device: torch.device) -> Tensor:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    # On the device, as in the engine: powers and cosines of a CPU differ in their last bits.
    with torch.inference_mode(False), set_current_vllm_config(VllmConfig()), device:
        rope = get_rope(
            config.head_dim,
            config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dtype=torch.bfloat16,
        )
    table: Tensor = rope.cos_sin_cache
    return table


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

    normed = rms_norm_batch_invariant(x, weight, epsilon)
    assert isinstance(normed, Tensor), "without a residual there is one result"
    return normed


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops as ops

    normed, total = x.clone(), residual.clone()
    ops.fused_add_rms_norm(normed, total, weight, epsilon)
    return normed, total


def _rotary(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops as ops

    query, key = query.contiguous().clone(), key.contiguous().clone()
    ops.rotary_embedding(positions, query, key, table.shape[1], table, True)
    return query, key


def _attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """FlashAttention 3 over a paged cache, as the engine calls it: its tiles are not those without pages."""
    count, pages = len(rows.mask), -(-rows.longest // PAGE)
    places = rows.cells // rows.longest  # the row of each token
    slots = places * pages * PAGE + rows.positions
    caches = [
        tensor.new_zeros(count * pages * PAGE, *tensor.shape[1:]).index_copy_(0, slots, tensor).unflatten(0, (-1, PAGE))
        for tensor in (key, value)
    ]  # [blocks, PAGE, K, D] each
    table = torch.arange(count * pages, dtype=torch.int32, device=query.device).view(count, pages)
    attended = _flash(query, caches, table, rows.starts, rows.lengths, rows.longest)
    if not len(singles := rows.singles):
        return attended
    starts = torch.arange(len(singles) + 1, dtype=torch.int32, device=query.device)
    seen = (rows.positions[singles] + 1).to(torch.int32)
    return attended.index_copy(0, singles, _flash(query[singles], caches, table[places[singles]], starts, seen, 1))


def _flash(query: Tensor, caches: list[Tensor], table: Tensor, starts: Tensor, seen: Tensor, most: int) -> Tensor:
    """Rows of at most `most` queries, from `starts` on, each over its first `seen` positions."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    attended: Tensor = flash_attn_varlen_func(
        query.contiguous(),
        caches[0],
        caches[1],
        max_seqlen_q=most,
        cu_seqlens_q=starts,
        max_seqlen_k=table.shape[1] * PAGE,
        seqused_k=seen,
        softmax_scale=query.shape[-1] ** -0.5,
        causal=True,
        block_table=table,
        num_splits=1,
        fa_version=3,
    )
    return attended


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    from vllm import _custom_ops  # noqa: F401 - loads the compiled ops

    gate_up = gate_up.contiguous()
    result = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    torch.ops._C.silu_and_mul(result, gate_up)
    return result


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    vocabulary = len(weight)
    padded = F.pad(weight.to(hidden.dtype), (0, 0, 0, pad_vocab_size(vocabulary) - vocabulary))
    logits = torch.mm(hidden, padded.t(), out_dtype=torch.float32)[:, :vocabulary]
    return logits if bias is None else logits + bias.to(hidden.dtype).float()


def _logprobs(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logits = logits.clone()
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    apply_temperature(logits, rows, temperatures.float())
    return compute_token_logprobs(logits, ids[:, None])[:, 0]
