"""The trainer's end of an update: what a learner holds, sharded or not, goes over whole and in the engine's dtype."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlenv.engine.base import Manifest, Peer
from rlenv.engine.transfer.plugin import IPC, NCCL, SHARED_MEMORY
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.transfer.transports import transport_of
from rlenv.errors import ConfigError, LearnerError
from rlenv.models import default_model

RANKS = 2


class Client:
    """Writes down what is announced."""

    peer = Peer("engine", 1, 1)

    def __init__(self) -> None:
        self.announced: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.announced.append(update_info)


def main() -> None:
    """One rank of a learner that FSDP2 shards: sends, and writes what it sent."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    client = Client()
    manifest = ModelSender(model, backend=SHARED_MEMORY, dtype="bfloat16", rank=rank).send(client)
    result = {"local": local, "announced": len(client.announced), "digests": digests(manifest)}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    destroy_process_group()


def digests(manifest: Manifest) -> dict[str, list[Any]]:
    return {name: [digest.dtype, list(digest.shape), digest.value] for name, digest in manifest.items()}


@pytest.mark.slow
def test_a_model_that_fsdp2_shards_is_sent_whole_by_its_first_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.rlenv.engine.test_sender"]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(RANKS)]
    assert [rank.wait(120) for rank in ranks] == [0] * RANKS
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    whole = digests(ModelSender(model, backend=SHARED_MEMORY, dtype="bfloat16").send(Client()))
    assert first["digests"] == whole
    assert (second["digests"], first["announced"], second["announced"]) == ({}, 1, 0)
    assert first["local"] + second["local"] == sum(parameter.numel() for parameter in model.parameters())
    assert max(first["local"], second["local"]) < 0.6 * sum(parameter.numel() for parameter in model.parameters())


def test_a_weight_that_is_not_finite_is_not_sent() -> None:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = float("nan")
    client = Client()
    with pytest.raises(LearnerError, match="bias is not finite"):
        ModelSender(model, backend=SHARED_MEMORY).send(client)
    assert client.announced == []


def test_an_unknown_transport_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        transport_of("carrier pigeon")
    assert all(repr(name) in str(caught.value) for name in (SHARED_MEMORY, IPC, NCCL))


if __name__ == "__main__":
    main()
