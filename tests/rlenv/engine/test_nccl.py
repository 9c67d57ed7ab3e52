"""NCCL between learner and engines: what is wrong is said before anything is sent, and nothing waits for ever.

There is no GPU here: vLLM's communicator is made up, and so are its loops over CUDA streams. Everything else is real,
the meeting by a TCP store as well.
"""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine
from vllm.utils import nccl as vllm_nccl

from rlenv.engine.base import Peer
from rlenv.engine.transfer import nccl, patience
from rlenv.engine.transfer.nccl import MeetingNCCLWeightTransferEngine, compare, nccl_facts
from rlenv.engine.transfer.plugin import NCCL
from rlenv.engine.transfer.sender import ModelSender
from rlenv.errors import ConfigError, EngineDeadError, EngineError
from tests.rlenv.engine.fake_nccl import FakeCommunicator, Wire, consume, produce

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FACTS: dict[str, Any] = {"version": "2.29.7", "pins": {"NCCL_PROTO": "Simple"}, "gpu": None, "host": None}


class Library:
    """An NCCL that loads."""

    def ncclGetVersion(self) -> str:
        return "2.29.7"


class Model(torch.nn.Module):
    """Two weights, one of which does not fit into a buffer with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.arange(4096.0).view(64, 64))
        self.narrow = torch.nn.Parameter(torch.tensor([1.5, -2.5]))


class Worker(MeetingNCCLWeightTransferEngine):
    """vLLM's worker end with its model reduced to what it was given."""

    def __init__(self, rank: int) -> None:
        self.got: dict[str, torch.Tensor] = {}
        model: Any = SimpleNamespace(load_weights=self.load)
        parallel: Any = SimpleNamespace(data_parallel_index=rank, world_size=1, rank=0)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
        transfer: Any = SimpleNamespace(backend=NCCL)
        super().__init__(transfer, config, CPU, model)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.got.update({name: tensor.clone() for name, tensor in weights})


@dataclass
class Client:
    """An engine's workers, called as an update calls them; `calls` are what the sender asked."""

    workers: list[Worker]
    peer: Peer
    calls: list[str] = field(default_factory=list)
    dies: bool = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("meet" if init_info.get("join", True) else "compare")
        self._on_each(lambda worker: worker.init_transfer_engine(worker.parse_init_info(init_info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        if self.dies:
            time.sleep(0.05)
            raise EngineDeadError("the engine was killed")
        self._on_each(lambda worker: worker.receive_weights(worker.parse_update_info(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def _on_each(self, call: Callable[[Worker], None]) -> None:
        nccl.within(30, "the workers", *(lambda worker=worker: call(worker) for worker in self.workers))


@dataclass
class Lab:
    """Where communicators come from: `groups` of the trainer in their order, `spoil` is done to each new one."""

    engines: int = 0
    groups: list[FakeCommunicator] = field(default_factory=list)
    spoil: Callable[[FakeCommunicator], None] = lambda group: None
    wires: dict[int, Wire] = field(default_factory=dict)  # by port

    def engine(self, workers: int = 1) -> Client:
        self.engines += 1
        return Client([Worker(rank) for rank in range(workers)], Peer(f"engine {self.engines}", 1, workers))

    def trainer(self, group: StatelessProcessGroup, device: Any) -> FakeCommunicator:
        made = self._made(group)
        self.groups.append(made)
        return made

    def worker(self, info: Any, parallel: Any) -> FakeCommunicator:
        rank = parallel.data_parallel_index + info.rank_offset
        where = (info.master_address, info.master_port)
        return self._made(StatelessProcessGroup.create(*where, rank=rank, world_size=info.world_size))

    def _made(self, group: StatelessProcessGroup) -> FakeCommunicator:
        port = group.broadcast_obj(group.rank or id(group), src=0)  # as vLLM sends NCCL's id
        wire = self.wires.setdefault(port, Wire(group.world_size - 1))
        made = FakeCommunicator(wire, group.rank, group)
        self.spoil(made)
        return made


@pytest.fixture(scope="module")
def quiet() -> None:
    """vLLM imports its model loader when a worker first receives, and torch warns about itself then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.model_executor.model_loader.mtp_validation")


@pytest.fixture
def lab(quiet: None, monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab()
    monkeypatch.setattr(nccl, "PyNcclCommunicator", lab.trainer)
    monkeypatch.setattr(nccl, "worker_init_process_group", lab.worker)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", consume)
    monkeypatch.setattr(nccl, "nccl_facts", lambda device: FACTS)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    return lab


@pytest.fixture
def sender() -> ModelSender:
    return ModelSender(Model(), backend=NCCL)


def change(sender: ModelSender) -> None:
    with torch.no_grad():
        for parameter in sender.model.parameters():
            parameter.mul_(-3)


def arrived(client: Client, sender: ModelSender) -> bool:
    return all(
        worker.got.keys() == {"wide", "narrow"}
        and all(torch.equal(worker.got[name], value) for name, value in sender.model.named_parameters())
        for worker in client.workers
    )


def test_every_value_reaches_every_worker_over_one_meeting(lab: Lab, sender: ModelSender) -> None:
    client = lab.engine(workers=2)
    sender.send(client)
    assert arrived(client, sender)
    change(sender)
    sender.send(client)
    assert arrived(client, sender)
    update = ["start", "update", "finish"]
    assert client.calls == ["compare", "meet", *update, *update]
    assert [group.rank for group in lab.groups] == [0]


def test_two_engines_have_a_communicator_each(lab: Lab, sender: ModelSender) -> None:
    first, second = lab.engine(), lab.engine(workers=2)
    for client in (first, second, first, second):
        change(sender)
        sender.send(client)
        assert arrived(client, sender)
    assert [len(group.wire.queues) for group in lab.groups] == [1, 2]


def test_an_engine_that_was_started_again_is_met_again(lab: Lab, sender: ModelSender) -> None:
    client = lab.engine()
    sender.send(client)
    again = Client([Worker(0)], Peer(client.peer.engine, 2, 1))
    change(sender)
    sender.send(again)
    assert arrived(again, sender)
    assert [group.aborted.is_set() for group in lab.groups] == [True, False]


def test_a_worker_that_meets_a_new_trainer_leaves_the_old_one(lab: Lab, sender: ModelSender) -> None:
    client = lab.engine()
    sender.send(client)
    other = ModelSender(Model(), backend=NCCL)
    change(other)
    other.send(client)
    assert arrived(client, other)


@pytest.mark.parametrize(
    ("worker", "named"),
    [
        (FACTS | {"version": "2.28.9"}, "NCCL 2.29.7, the engine 2.28.9"),
        (FACTS | {"pins": {}}, r"NCCL_PROTO \(Simple there, unset here\)"),
        (FACTS | {"pins": {"NCCL_PROTO": "LL"}}, r"NCCL_PROTO \(Simple there, LL here\)"),
        (
            FACTS | {"pins": {**FACTS["pins"], "NCCL_ALGO": "ring"}},
            r"NCCL_ALGO \(unset there, ring here\)",
        ),
    ],
)
def test_sides_that_differ_never_meet(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch, worker: dict[str, Any], named: str
) -> None:
    client = lab.engine()
    sides = iter([FACTS, worker])
    monkeypatch.setattr(nccl, "nccl_facts", lambda device: next(sides))
    with pytest.raises(ConfigError, match=named):
        sender.send(client)
    assert client.calls == ["compare"]
    assert lab.groups == []


def test_a_gpu_that_both_sides_use_is_refused(lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "nccl_facts", lambda device: FACTS | {"gpu": "GPU-1"})
    client = lab.engine()
    with pytest.raises(ConfigError, match=r"share the GPU GPU-1.*transport='ipc'"):
        sender.send(client)
    assert (client.calls, lab.groups) == (["compare"], [])


def test_a_gpu_that_nccl_takes_for_two_on_different_hosts_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "NCCLLibrary", Library)
    worker = nccl_facts(CPU) | {"gpu": "GPU-1"}
    monkeypatch.setenv("NCCL_HOSTID", "the learner's")
    compare(nccl_facts(CPU) | {"gpu": "GPU-1"}, worker)


def test_what_nccl_says_when_both_cannot_meet_is_told_as_the_engines_error(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(group: StatelessProcessGroup, device: Any) -> None:
        raise RuntimeError("NCCL error: invalid usage")

    def wait(info: Any, parallel: Any) -> None:
        StatelessProcessGroup.create(info.master_address, info.master_port, rank=1, world_size=2)
        time.sleep(1)

    monkeypatch.setattr(nccl, "PyNcclCommunicator", refuse)
    monkeypatch.setattr(nccl, "worker_init_process_group", wait)
    with pytest.raises(EngineError, match="did not meet over NCCL: NCCL error: invalid usage"):
        sender.send(lab.engine())


def test_a_meeting_that_comes_about_too_late_changes_nothing(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, gone, left = lab.engine(), threading.Event(), threading.Event()

    def late(info: Any, parallel: Any) -> FakeCommunicator:
        gone.wait(10)
        left.set()
        return FakeCommunicator(Wire(1), 1)

    monkeypatch.setattr(nccl, "JOIN_DEADLINE_S", 0.2)
    monkeypatch.setattr(nccl, "worker_init_process_group", late)
    with pytest.raises(EngineError, match="did not meet"):
        sender.send(client)
    monkeypatch.setattr(nccl, "JOIN_DEADLINE_S", 20.0)
    monkeypatch.setattr(nccl, "worker_init_process_group", lab.worker)
    sender.send(client)
    gone.set()
    assert left.wait(5)
    change(sender)
    sender.send(client)
    assert arrived(client, sender)


def test_what_only_says_where_to_log_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "NCCLLibrary", Library)
    plain = nccl_facts(CPU)
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_LAUNCH_MODE"):
        monkeypatch.setenv(name, "1")
    compare(plain, nccl_facts(CPU))
    monkeypatch.setenv("NCCL_NTHREADS", "1")
    with pytest.raises(ConfigError, match="NCCL_NTHREADS"):
        compare(plain, nccl_facts(CPU))


def test_pins_that_vllm_takes_off_for_shared_communicators_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "NCCLLibrary", Library)
    plain = nccl_facts(CPU)
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setattr(vllm_nccl, "_unpinned_env", {"NCCL_PROTO": None})
    compare(plain, nccl_facts(CPU))


def test_an_nccl_that_is_switched_off_is_told_before_anything_is_sent(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "nccl_facts", nccl_facts)
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    client = lab.engine()
    with pytest.raises(ConfigError, match="switched off by VLLM_DISABLE_PYNCCL"):
        sender.send(client)
    assert client.calls == []


@pytest.mark.parametrize(
    ("library", "why"),
    [("libc.so.6", "undefined symbol: nccl"), ("/nowhere/libnccl.so.2", "cannot open shared object")],
)
def test_a_library_that_is_no_nccl_is_told_before_anything_is_sent(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch, library: str, why: str
) -> None:
    monkeypatch.setattr(nccl, "nccl_facts", nccl_facts)
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", library)
    client = lab.engine()
    with pytest.raises(ConfigError, match=f"{why}.*VLLM_NCCL_SO_PATH"):
        sender.send(client)
    assert client.calls == []


@pytest.mark.parametrize("side", [0, 1])
def test_a_communicator_that_vllm_switched_off_moves_no_zeros(lab: Lab, sender: ModelSender, side: int) -> None:
    def spoil(group: FakeCommunicator) -> None:
        group.disabled = group.rank == side

    lab.spoil = spoil
    client = lab.engine()
    with pytest.raises(EngineError, match="switched NCCL off"):
        sender.send(client)
    assert "start" not in client.calls


def test_an_engine_that_does_not_come_to_the_meeting_is_given_up(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "JOIN_DEADLINE_S", 0.3)
    client = lab.engine()
    gone = threading.Event()
    monkeypatch.setattr(nccl, "worker_init_process_group", lambda *_: gone.wait(10))
    with pytest.raises(EngineError, match=r"did not meet the (engine|trainer) within 0.3 s"):
        sender.send(client)
    gone.set()
    assert "start" not in client.calls


def test_a_learner_that_dies_in_mid_transfer_leaves_a_worker_that_says_so(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lab.engine()
    sender.send(client)
    monkeypatch.setattr(patience, "SEND_DEADLINE_S", 0.2)
    info = {"names": ["wide"], "dtype_names": ["float32"], "shapes": [[64, 64]]}
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"waited 0.2 s for the trainer"):
        client.update_weights(info)
    assert time.monotonic() - began < 5
    with pytest.raises(EngineError, match="closed"):
        client.update_weights(info)
    other = ModelSender(Model(), backend=NCCL)  # the learner that comes after it
    monkeypatch.setattr(patience, "SEND_DEADLINE_S", 20.0)
    other.send(client)
    assert arrived(client, other)


def test_an_engine_that_dies_in_mid_transfer_ends_the_broadcast_with_its_own_error(
    lab: Lab, sender: ModelSender
) -> None:
    client = lab.engine()
    sender.send(client)
    lab.groups[0].waits = client.dies = True
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="the engine was killed"):
        sender.send(client)
    assert time.monotonic() - began < 5
    assert client.calls[-1] == "update"
    client.dies = False
    change(sender)
    sender.send(client)  # over a new communicator
    assert arrived(client, sender)
    assert len(lab.groups) == 2


def test_a_broadcast_that_nobody_takes_is_given_up(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lab.engine()
    sender.send(client)
    monkeypatch.setattr(patience, "SEND_DEADLINE_S", 0.2)
    lab.groups[0].waits = True
    with pytest.raises(EngineError, match=r"waited 0.2 s for the (engine|trainer)"):
        sender.send(client)
    assert client.calls[-1] == "update"


@pytest.mark.parametrize("at", ["start", "finish"])
def test_an_update_that_cannot_begin_or_end_closes_the_connection(
    lab: Lab, sender: ModelSender, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def refuse(*_: Any) -> None:
        raise EngineError("not now")

    client = lab.engine()
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="not now"):
        patch.setattr(client, f"{at}_weight_update", refuse)
        sender.send(client)
    assert lab.groups[0].aborted.is_set()
    change(sender)
    sender.send(client)
    assert arrived(client, sender)


def test_the_time_for_a_transfer_grows_with_it() -> None:
    group = nccl.WatchedCommunicator(FakeCommunicator(Wire(1), 0))
    with nccl.watched(group, int(16e9), "the engine"):
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert [timer.interval for timer in timers] == [21.0]
    assert not group.disabled


def test_a_broadcast_after_the_end_raises_instead_of_moving_nothing() -> None:
    group = FakeCommunicator(Wire(1), 0)
    watched = nccl.WatchedCommunicator(group)
    watched.destroy()
    watched.destroy()
    with pytest.raises(EngineError, match="closed"):
        watched.broadcast(torch.zeros(1), src=0)
