"""Padded token ids enter; log-probs of the live tokens leave that are the engine's own bits, with gradients.

A transformers model holds the weights and none of its code runs: its layers are walked here with the kernels of
vLLM's model, in the order in which vLLM calls them. So the mismatch between engine and learner is 0 wherever
both have the same weights, and needs no correction.

The letters of shapes are those of `rlenv.engine.kernels`; L are live tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlenv.agents.gradients import with_gradients
from rlenv.agents.policy import Policy
from rlenv.agents.support import restrict
from rlenv.engine.kernels import Kernels, Rows, vllm_kernels
from rlenv.errors import ConfigError

COVERED = ("LlamaForCausalLM", "Qwen3ForCausalLM")


class ExactPolicy(Policy):
    """A `Policy` with the values of a `VLLMEngine(device="cuda", batch_invariant=True)` in bf16.

    The bits are the engine's where it took in a row's text at once and then its own tokens one by one. Behind the 128th
    position numerics are left where it did otherwise: at a later turn, after a weight swap, in a step that also takes
    in another request's text.

    Parameters stay in their dtype, fp32 for training; each forward casts them as the engine's are cast. Gradients
    are those of plain torch in bf16, behind the head in fp32. Layers are not called as modules: wrappers that gather
    a layer's parameters when it is called (FSDP) do not work with it.

    Raises ConfigError for a model that is not covered, or where vLLM's kernels cannot run.
    """

    def __init__(self, model: PreTrainedModel, *, kernels: Kernels | None = None) -> None:
        super().__init__(model)
        self._kernels = with_gradients(kernels or vllm_kernels())
        self._table: Tensor | None = None  # [P, D], once the device is known

    def _hidden(self, token_ids: Tensor, attention_mask: Tensor, sampled: Tensor) -> Tensor:
        rows = Rows(attention_mask.bool(), sampled.bool())
        with torch.autocast(token_ids.device.type, enabled=False):
            return rows.pad(self._walk(rows.pack(token_ids), rows))

    def _score_chunk(self, hidden: Tensor, targets: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        temperature, top_p, top_k = sampling.unbind(-1)
        head = self.model.get_output_embeddings()
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self._kernels.head(hidden, head.weight, head.bias)  # [C, V]
            left = restrict(logits / temperature[:, None], top_p, top_k, targets)
            logits = logits.masked_fill(left.isneginf(), -torch.inf)
            logprobs = self._kernels.logprobs(logits, targets, temperature)
            with torch.no_grad():
                entropies = torch.special.entr(left.softmax(-1)).sum(-1)
        return logprobs, entropies

    def _check_head(self) -> None:
        _check_covered(self.model)

    def _walk(self, ids: Tensor, rows: Rows) -> Tensor:
        """Packed ids [N] → the last hidden states [N, H]"""
        model, kernels = self.model.base_model, self._kernels
        if self._table is None or self._table.device != ids.device:
            self._table = kernels.cos_sin(self.model.config, ids.device)
        hidden, residual = self._cast(F.embedding(ids, model.embed_tokens.weight)), None
        for layer in model.layers:
            hidden, residual = self._norm(layer.input_layernorm, hidden, residual)
            hidden = self._attend(layer.self_attn, hidden, rows, self._table)
            hidden, residual = self._norm(layer.post_attention_layernorm, hidden, residual)
            gate_up = self._linear(hidden, layer.mlp.gate_proj, layer.mlp.up_proj)
            hidden = self._linear(kernels.silu_and_mul(gate_up), layer.mlp.down_proj)
        return self._norm(model.norm, hidden, residual)[0]

    def _attend(self, attention: Any, hidden: Tensor, rows: Rows, table: Tensor) -> Tensor:
        size = attention.head_dim
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        joined = self._linear(hidden, *projections)
        query, key, value = joined.split([projection.out_features for projection in projections], -1)
        if hasattr(attention, "q_norm"):
            query = self._norm(attention.q_norm, query.unflatten(-1, (-1, size)))[0].flatten(-2)
            key = self._norm(attention.k_norm, key.unflatten(-1, (-1, size)))[0].flatten(-2)
        query, key = self._kernels.rotary(rows.positions, query, key, table)
        query, key, value = (tensor.unflatten(-1, (-1, size)) for tensor in (query, key, value))  # [N, heads, D] each
        attended = self._kernels.attention(query, key, value, rows)
        return self._linear(attended.flatten(-2), attention.o_proj)

    def _norm(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What enters the next op, and the residual stream."""
        weight = self._cast(norm.weight)
        if residual is None:
            return self._kernels.rms_norm(x, weight, norm.variance_epsilon), x
        return self._kernels.add_rms_norm(x, residual, weight, norm.variance_epsilon)

    def _linear(self, x: Tensor, *layers: nn.Linear) -> Tensor:
        """Layers that share their input as one matmul, as in the engine: its tiles depend on the width."""
        weight = torch.cat(tuple(layer.weight for layer in layers))
        biases = tuple(layer.bias for layer in layers if layer.bias is not None)
        return self._kernels.linear(x, self._cast(weight), self._cast(torch.cat(biases)) if biases else None)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._kernels.dtype)


def _check_covered(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if name not in COVERED:
        raise ConfigError(f"engine ops do not cover {name}, only {' and '.join(COVERED)}: leave engine_ops out")
    rope = config.rope_parameters
    unusual = {
        "hidden_act": config.hidden_act != "silu",
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for setting, is_unusual in unusual.items():
        if is_unusual:
            raise ConfigError(f"engine ops do not cover this {name} for its {setting}: leave engine_ops out")
