"""The trainer's end of a weight update: a model goes in, its weights reach the engine, a manifest comes out.

vLLM's own trainer engine moves the weights on one GPU (`ipc`); `shm` is ours and imports no vLLM. Casting, staging and
fingerprinting come before `start_weight_update`, where the engine pauses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.transfer.digest import tensor_digest
from rlenv.engine.transfer.plugin import IPC, SHARED_MEMORY
from rlenv.errors import ConfigError, LearnerError

Weights = list[tuple[str, torch.Tensor]]


class ModelSender:
    """Sends `model` in the engine's `dtype`; implements WeightSender for a model of this process."""

    def __init__(self, model: torch.nn.Module, *, backend: str, dtype: str = "float32", rank: int = 0) -> None:
        if backend not in (SHARED_MEMORY, IPC):
            raise ConfigError(
                f"no weight transfer named {backend!r}: use {SHARED_MEMORY!r} on CPUs, {IPC!r} on one GPU"
            )
        self.model = model
        self._dtype = getattr(torch, dtype)
        self.transport: _SharedMemory | _NativeTransport = (
            _SharedMemory() if backend == SHARED_MEMORY else _NativeTransport(rank)
        )

    def send(self, client: WeightSyncClient) -> Manifest:
        """Move every parameter; returns the fingerprints of what was sent.

        Raises LearnerError if a weight is not finite, before the engine is touched.
        """
        weights = self.staged()
        for name, tensor in weights:
            if not bool(torch.isfinite(tensor).all()):
                raise LearnerError(f"the learner's weight {name} is not finite: it is not sent")
        manifest = {name: tensor_digest(tensor) for name, tensor in weights}
        self.transport.send(weights, client)
        return manifest

    def staged(self) -> Weights:
        """Every parameter under its checkpoint name, whole, in the engine's dtype."""
        return [(name, _full(parameter).to(self._dtype)) for name, parameter in self.model.named_parameters()]

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


class _SharedMemory:
    """One anonymous file, reused; it has no name to leak and dies with this process."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def send(self, weights: Weights, client: WeightSyncClient) -> None:
        info = self._stage(weights)
        client.start_weight_update()
        client.update_weights(info)
        client.finish_weight_update()

    def _stage(self, weights: Weights) -> dict[str, Any]:
        if self._descriptor is None:
            self._descriptor = os.memfd_create("rlenv-weights")
        offsets, offset = [], 0
        for _, tensor in weights:
            offsets.append(offset)
            data = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
            os.pwrite(self._descriptor, data.tobytes(), offset)
            offset += -(-data.nbytes // 64) * 64  # 64-byte alignment suits every dtype
        os.ftruncate(self._descriptor, offset)
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._descriptor}",
            "names": [name for name, _ in weights],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
            "shapes": [list(tensor.shape) for _, tensor in weights],
            "offsets": offsets,
        }

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class _NativeTransport:
    """vLLM's own `ipc` trainer engine, which is bound to one client and one source for life."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._relay = _Relay()
        self._source: Any = None
        self._engine: Any = None

    def send(self, weights: Weights, client: WeightSyncClient) -> None:
        self._relay.client = client
        if self._engine is None:
            self._connect(weights)
        self._source.weights = weights
        self._engine.send_weights()
        self._source.weights = []

    def _connect(self, weights: Weights) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        class Source(WeightSource):
            def __init__(self) -> None:
                self.weights: Weights = weights

            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(self.weights)

        self._source = Source()
        self._engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=self._rank, packed=False), client=self._relay, source=self._source
        )


class _Relay:
    """Forwards to the client of the update under way, with handles in plain types."""

    client: WeightSyncClient

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        from rlenv.engine.transfer.ipc import plain_handles

        assert isinstance(update_info, dict)
        self.client.update_weights(plain_handles(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.client.finish_weight_update(weight_version)


def _full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor: an FSDP shard is gathered, which is a collective; others come back as they are."""
    gather = getattr(parameter, "full_tensor", None)
    return (gather() if callable(gather) else parameter).detach()
