"""The trainer's ends of weight transfer: named weights and the engine's client go in, the values reach the worker.

`shm` is ours and imports no vLLM; on GPUs vLLM's own trainer engines move the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlenv.engine.base import WeightSyncClient
from rlenv.engine.transfer.plugin import IPC, NCCL, SHARED_MEMORY
from rlenv.errors import ConfigError, EngineDeadError, WeightUpdateError

if TYPE_CHECKING:
    from rlenv.engine.transfer.nccl import WatchedCommunicator

Weights = list[tuple[str, torch.Tensor]]


class Transport(Protocol):
    """One way from learner to engines; an engine's first update connects it, if it has to be connected."""

    def send(self, weights: Weights, client: WeightSyncClient) -> None:
        """Start the update, move every value, finish it."""


def transport_of(backend: str) -> Transport:
    """The trainer's end of a weight-transfer backend, by the name under which vLLM's workers know theirs."""
    if backend not in _TRANSPORTS:
        raise ConfigError(
            f"no weight transfer named {backend!r}: use {SHARED_MEMORY!r} on CPUs, {IPC!r} on one GPU, {NCCL!r} from "
            "one GPU to others"
        )
    return _TRANSPORTS[backend]()


class SharedMemory:
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


class CudaIPC:
    """Handles of the learner's memory, for engines on the same GPU."""

    def __init__(self) -> None:
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
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        self._source = _source(weights)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0, packed=False), client=self._relay, source=self._source
        )


class NCCLBroadcast:
    """One communicator for each engine: this process is its rank 0, the engine's workers are the others."""

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}

    def send(self, weights: Weights, client: WeightSyncClient) -> None:
        """Raises ConfigError, before anything is sent, if NCCL cannot work; EngineError if it took too long."""
        peer = client.peer
        connection = self._connections.pop(peer.engine, None)
        if connection is not None and connection.peer != peer:
            connection.close()  # with an engine that was started again since
            connection = None
        connection = connection or _Connection(client, weights[0][1].device)
        try:
            connection.send(weights, client)
        except BaseException:
            connection.close()  # nobody knows how far the other side got
            raise
        self._connections[peer.engine] = connection


class _Connection:
    """A communicator that was met with an engine, and the trainer engine of vLLM that sends over it."""

    def __init__(self, client: WeightSyncClient, device: torch.device) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        self.peer = client.peer
        self._group = _met(client, device)
        self._device, self._relay, self._source = device, _Broadcasting(self._group), _source([])
        engine: Any = NCCLTrainerWeightTransferEngine(client=self._relay, source=self._source)
        engine.model_update_group = self._group
        self._engine = engine

    def send(self, weights: Weights, client: WeightSyncClient) -> None:
        from rlenv.engine.transfer import nccl

        self._relay.client, self._source.weights = client, weights
        client.start_weight_update()  # may wait for requests, as long as they take
        try:
            count = sum(tensor.nbytes for _, tensor in weights)
            with nccl.watched(self._group, count, "the engine"), nccl.current(self._device):
                self._engine.send_weights()
        except Exception:
            if self._relay.error is not None:  # the broadcast ended because the engine had failed
                raise self._relay.error from None
            raise
        finally:
            self._source.weights = []
        client.finish_weight_update()

    def close(self) -> None:
        self._group.destroy()


def _met(client: WeightSyncClient, device: torch.device) -> WatchedCommunicator:
    """Compare what learner and engine have, then let them meet. Nothing is sent when either fails."""
    from rlenv.engine.transfer import nccl

    host, facts = _address(), nccl.nccl_facts(device)
    with nccl.free_socket(host) as listening:
        meeting = {
            "master_address": host,
            "master_port": listening.getsockname()[1],
            "rank_offset": 1,
            "world_size": 1 + client.peer.workers,
            "packed": True,
        }
        try:
            client.init_weight_transfer_engine({**meeting, "trainer": facts, "join": False})
        except (ConfigError, EngineDeadError, WeightUpdateError):
            raise
        except Exception as error:  # what the worker said comes by way of vLLM
            raise ConfigError(f"learner and engine cannot meet over NCCL: {error}") from error
        return nccl.meet(lambda: client.init_weight_transfer_engine(meeting), meeting, listening, device)


def _source(weights: Weights) -> Any:
    """vLLM's view of weights that are staged already."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Staged(WeightSource):
        def __init__(self) -> None:
            self.weights = weights

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(self.weights)

    return Staged()


class _Relay:
    """Forwards to the client of the update under way, with CUDA handles in plain types."""

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


class _Broadcasting:
    """Lets the workers receive while vLLM's trainer engine broadcasts; the update begins and ends outside of that."""

    client: WeightSyncClient

    def __init__(self, group: WatchedCommunicator) -> None:
        self._group = group
        self.error: Exception | None = None  # with which the engine failed to take weights

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        try:
            self.client.update_weights(update_info)
        except Exception as error:
            self.error = error
            self._group.destroy()  # nobody receives any more
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Has happened."""

    def start_weight_update(self) -> None:
        """Has happened."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Will happen."""


def _address() -> str:
    """This machine's address, as workers on others reach it; VLLM_HOST_IP says which, where it has several."""
    from vllm.utils.network_utils import get_ip

    address: str = get_ip()
    return "127.0.0.1" if address == "0.0.0.0" else address  # a machine without a network talks to itself


_TRANSPORTS: dict[str, Callable[[], Transport]] = {SHARED_MEMORY: SharedMemory, IPC: CudaIPC, NCCL: NCCLBroadcast}
