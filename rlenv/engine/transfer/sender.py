"""The trainer's end of a weight update: a model goes in, its weights reach the engine, a manifest comes out.

Gathering, casting and fingerprinting come before the transport starts the update, where the engine pauses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.transfer.digest import tensor_digest
from rlenv.engine.transfer.transports import Weights, transport_of
from rlenv.errors import LearnerError


class ModelSender:
    """Sends `model` in the engine's `dtype`; implements WeightSender for a model of this process.

    A model that FSDP2 shards is gathered by all ranks together: each calls `send`, and rank 0 alone reaches the engine.
    """

    def __init__(self, model: torch.nn.Module, *, backend: str, dtype: str = "float32", rank: int = 0) -> None:
        self.model, self._rank = model, rank
        self._dtype = getattr(torch, dtype)
        self.transport = transport_of(backend)

    def send(self, client: WeightSyncClient) -> Manifest:
        """Move every parameter; returns the fingerprints of what was sent.

        Raises LearnerError if a weight is not finite, before the engine is touched.
        """
        if self._rank:
            for _ in self._whole():  # to take part in the gathering; what is gathered is dropped at once
                continue
            return {}
        weights = self.staged()
        for name, tensor in weights:
            if not bool(torch.isfinite(tensor).all()):
                raise LearnerError(f"the learner's weight {name} is not finite: it is not sent")
        manifest = {name: tensor_digest(tensor) for name, tensor in weights}
        self.transport.send(weights, client)
        return manifest

    def staged(self) -> Weights:
        """Every parameter under its checkpoint name, whole, in the engine's dtype."""
        return list(self._whole())

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, _full(parameter).to(self._dtype)) for name, parameter in self.model.named_parameters())

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities [n - 1] of ids 1..n-1 of each sequence; lm_head and log-softmax in fp32."""
        model: Any = self.model
        head = model.get_output_embeddings()
        bias = None if head.bias is None else head.bias.float()
        training = model.training
        model.eval()
        result = []
        for ids in sequences:
            hidden = model.base_model(torch.tensor([list(ids)], device=head.weight.device)).last_hidden_state[0, :-1]
            logits = torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)  # [n - 1, V]
            targets = torch.tensor(list(ids[1:]), device=head.weight.device)
            result.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist())
        model.train(training)
        return result


def _full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor: an FSDP shard is gathered, which is a collective; others come back as they are."""
    gather = getattr(parameter, "full_tensor", None)
    return (gather() if callable(gather) else parameter).detach()
