"""Padded token ids enter; fp32 log-probs and entropies of the live tokens leave, and logits are never whole.

Legend: B rows, T ids of the longest, L live tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlenv.agents.learner_types import Scoring
from rlenv.agents.support import restrict
from rlenv.errors import ConfigError

LOGITS_PER_CHUNK = 2**24  # 64 MiB of fp32
HEAD_TOLERANCE = 1e-3  # nats


class Policy(nn.Module):
    """A causal language model that answers with log-probs of given ids; this is what Accelerate wraps.

    hidden states [B, T, H] → those before live tokens [L, H] → head → fp32 logits / temperature → top-k, top-p →
    log-softmax, C tokens at a time. Chunks are recomputed in the backward pass, so that no more than one chunk of
    logits [C, V] is in memory. The head multiplies in the precision that `scoring` says, whatever the model's dtype
    or autocast. The model is in eval mode: dropout would make two passes over the same weights disagree.

    Raises ConfigError when the head alone does not give the model's logits (soft-capped or scaled ones).
    """

    def __init__(self, model: PreTrainedModel, scoring: Scoring | None = None) -> None:
        super().__init__()
        self.model = model.eval()
        self.scoring = scoring or Scoring()
        self._check_head()

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor, live: Tensor, sampling: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, fp32 nats, [L] each, in the order of `token_ids[live]`.

        `token_ids`, `attention_mask` (False on padding, which is on the right) and `live` are [B, T], with
        no live token at t = 0; `sampling` is [L, 3], see `Batch`. Entropies carry no gradient.
        """
        # The last column is only ever a target.
        hidden = self._hidden(token_ids[:, :-1], attention_mask[:, :-1], live[:, :-1])  # [B, T - 1, H]
        chosen = live[:, 1:]
        targets = token_ids[:, 1:][chosen]  # [L]
        return self._score(hidden[chosen], targets, sampling)

    def _hidden(self, token_ids: Tensor, attention_mask: Tensor, sampled: Tensor) -> Tensor:
        output = self.model.base_model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False)
        return output.last_hidden_state

    def _score(self, hidden: Tensor, targets: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        size = max(1, LOGITS_PER_CHUNK // self.model.config.get_text_config().vocab_size)
        chunks = list(zip(hidden.split(size), targets.split(size), sampling.split(size), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            scores = [self._score_chunk(*chunk) for chunk in chunks]
        else:
            scores = [checkpoint(self._score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        logprobs, entropies = zip(*scores, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score_chunk(self, hidden: Tensor, targets: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        temperature, top_p, top_k = sampling.unbind(-1)
        logits = self._logits(hidden)  # [C, V]
        if self.scoring.temperature:
            logits = logits / temperature[:, None]
        if self.scoring.support:
            logits = restrict(logits, top_p, top_k, targets)
        log_softmax = logits.log_softmax(-1)
        with torch.no_grad():
            entropies = torch.special.entr(log_softmax.exp()).sum(-1)
        return log_softmax.gather(-1, targets[:, None])[:, 0], entropies

    def _logits(self, hidden: Tensor) -> Tensor:
        """[C, H] → fp32 [C, V]"""
        head = self.model.get_output_embeddings()
        dtype = getattr(torch, self.scoring.head)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            return F.linear(hidden.to(dtype), head.weight.to(dtype), bias).float()

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(8, device=self.model.device)[None] % self.model.config.get_text_config().vocab_size
        head = self.model.get_output_embeddings()
        by_head = head(self._hidden(ids, torch.ones_like(ids), torch.zeros_like(ids))).float().log_softmax(-1)
        difference = (self.model(ids, use_cache=False).logits.float().log_softmax(-1) - by_head).abs().max().item()
        if not difference <= HEAD_TOLERANCE:
            raise ConfigError(
                f"{type(self.model).__name__} changes its logits behind the output head (by up to {difference:.2g} "
                "nats), which the policy would miss: use a model without soft-capped or scaled logits"
            )
