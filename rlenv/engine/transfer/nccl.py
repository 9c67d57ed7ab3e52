"""NCCL from a learner's GPU to engines' GPUs: vLLM's `nccl` backend, which here can neither fail silently nor hang.

vLLM's communicator switches itself off where NCCL does not load, and its broadcasts then return without having moved a
byte. NCCL itself never asks whether both sides were set up alike, and has no timeout. So both sides say first what they
have (`nccl_facts`), the worker compares, and only then do they meet; every later step has a deadline.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import vllm.envs as envs
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.utils.nccl import unpinned_nccl_env

from rlenv.engine.transfer.patience import size_of, transfer_deadline_s
from rlenv.errors import ConfigError, EngineError, RlenvError

T = TypeVar("T")

JOIN_DEADLINE_S = 20.0  # for both sides to meet
# Variables that may differ: where to log, how a machine is connected, when kernels start; not how data is cut.
_OWN = (
    "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_HOME", "NCCL_HOSTID", "NCCL_IB_",
    "NCCL_LAUNCH_MODE", "NCCL_NO_CACHE", "NCCL_SOCKET_IFNAME", "NCCL_VERSION",
)  # fmt: skip
ABORT_S = 1.0
_ADVICE = "vLLM 0.32 needs NCCL 2.29.7 or later: point VLLM_NCCL_SO_PATH at one"


class Communicator(Protocol):
    """What is used of vLLM's `PyNcclCommunicator`."""

    disabled: bool

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None: ...
    def destroy(self) -> None: ...


class WatchedCommunicator:
    """vLLM's communicator, whose broadcasts move something or raise, and which another thread can end.

    Raises EngineError if vLLM switched it off, which it tells nobody.
    """

    def __init__(self, inner: Communicator | None) -> None:
        if inner is None or inner.disabled:
            raise EngineError(f"vLLM switched NCCL off, and weights would arrive as zeros: {_ADVICE}")
        self._inner = inner
        self._turn = threading.Lock()
        self.disabled = False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        with self._turn:  # a communicator must not be aborted while NCCL reads it
            if self.disabled or self._inner.disabled:
                raise EngineError("the transfer was given up: its communicator is closed")
            self._inner.broadcast(tensor, src, stream)

    def destroy(self) -> None:
        """Abort; kernels that wait for the other side end by it. A second call does nothing."""
        if self.disabled:
            return
        self.disabled = True
        ours = self._turn.acquire(timeout=ABORT_S)  # a first broadcast may block in there, and ends only by this
        try:
            self._inner.destroy()
        finally:
            if ours:
                self._turn.release()


@dataclass(kw_only=True)
class MeetingInfo(NCCLWeightTransferInitInfo):
    """vLLM's, and what the trainer has; with `join` False the worker only compares that with its own."""

    trainer: dict[str, Any] = field(default_factory=dict)
    join: bool = True


class MeetingNCCLWeightTransferEngine(NCCLWeightTransferEngine):
    """The worker's end: compares before it meets the trainer, and gives a transfer up at its deadline."""

    init_info_cls = MeetingInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        assert isinstance(init_info, MeetingInfo)
        if not init_info.join:
            compare(init_info.trainer, nccl_facts(self.device))
            return
        self.shutdown()  # an earlier trainer's
        group: Any = WatchedCommunicator(within(JOIN_DEADLINE_S, "the trainer", lambda: self._join(init_info)))
        self.model_update_group = group
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        group: Any = self.model_update_group
        if group is None:
            raise EngineError("no trainer has met this worker")
        count = size_of(zip(update_info.dtype_names, update_info.shapes, strict=True))
        with watched(group, count, "the trainer"):
            super().receive_weights(update_info)

    def _join(self, init_info: MeetingInfo) -> Communicator:
        """Keeps nothing: a meeting that was given up may still come about."""
        with current(self.device):
            group: Communicator = worker_init_process_group(init_info, self.parallel_config)
        return group


def nccl_facts(device: torch.device) -> dict[str, Any]:
    """NCCL's version, what pins it in this process, which GPU `device` is, and the host that NCCL takes this one for.

    Raises ConfigError if vLLM's NCCL would switch itself off.
    """
    if envs.VLLM_DISABLE_PYNCCL:
        raise ConfigError("NCCL is switched off by VLLM_DISABLE_PYNCCL: unset it, or weights cannot be moved")
    try:
        version = NCCLLibrary().ncclGetVersion()
    except Exception as error:  # a library that is missing, of another kind, or too old
        raise ConfigError(f"NCCL cannot be used ({error}): {_ADVICE}") from error
    with unpinned_nccl_env():  # as vLLM makes the communicator that both sides share
        pins = {name: value for name, value in os.environ.items() if _is_pin(name)}
    gpu = None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    return {"version": version, "pins": pins, "gpu": gpu, "host": os.environ.get("NCCL_HOSTID")}


def compare(trainer: dict[str, Any], worker: dict[str, Any]) -> None:
    """Raise ConfigError unless both sides are of one NCCL, and on GPUs of their own: they would wait for ever.

    NCCL itself allows one GPU to processes that NCCL_HOSTID puts on different hosts; bytes then go by the network.
    """
    one_host = trainer["host"] == worker["host"]
    if one_host and trainer["gpu"] == worker["gpu"] and worker["gpu"] is not None:
        raise ConfigError(
            f"learner and engine share the GPU {worker['gpu']}, within which NCCL moves nothing: start the engine with "
            "transport='ipc', or the learner on another GPU"
        )
    if trainer["version"] != worker["version"]:
        raise ConfigError(
            f"the learner has NCCL {trainer['version']}, the engine {worker['version']}: give both the same, by "
            "VLLM_NCCL_SO_PATH"
        )
    names = sorted(trainer["pins"].keys() | worker["pins"].keys())
    differing = [name for name in names if trainer["pins"].get(name) != worker["pins"].get(name)]
    if differing:
        told = ", ".join(
            f"{name} ({trainer['pins'].get(name, 'unset')} there, {worker['pins'].get(name, 'unset')} here)"
            for name in differing
        )
        raise ConfigError(f"NCCL is pinned otherwise in the learner than in the engine: {told}. Set both alike")


def meet(
    worker: Callable[[], None], meeting: dict[str, Any], listening: socket.socket, device: torch.device
) -> WatchedCommunicator:
    """The trainer's communicator; meanwhile `worker` makes the workers join. Raises EngineError if one side fails."""

    def open_group() -> WatchedCommunicator:
        group = StatelessProcessGroup.create(
            meeting["master_address"],
            meeting["master_port"],
            rank=0,
            world_size=meeting["world_size"],
            store_timeout=math.ceil(2 * JOIN_DEADLINE_S),  # `within` comes first
            listen_socket=listening,
        )
        with current(device), unpinned_nccl_env():
            return WatchedCommunicator(PyNcclCommunicator(group, device=device))

    try:
        return within(JOIN_DEADLINE_S, "the engine", open_group, worker)
    except RlenvError:
        raise
    except Exception as error:  # of NCCL, of the store where both meet, or what the worker said by way of vLLM
        raise EngineError(f"learner and engine did not meet over NCCL: {error}") from error


def free_socket(host: str) -> socket.socket:
    """A listening socket on a free port, which nobody else can take before it is used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen()
    return listening


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Let this thread use `device`: a new one starts on the first GPU."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = torch.accelerator.device_index(device.index or 0)
    return context


def within(deadline_s: float, whom: str, call: Callable[[], T], *beside: Callable[[], object]) -> T:
    """What `call` returns, once all are done. Raises the first error, or EngineError when their time is over.

    Each runs on a thread of its own, which is left alone if it hangs: NCCL cannot be told to stop before both have met.
    """
    futures = [_started(one) for one in (call, *beside)]
    done, late = wait(futures, deadline_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if late:
        raise EngineError(f"NCCL did not meet {whom} within {deadline_s:g} s")
    result: T = futures[0].result()
    return result


def _started(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextlib.contextmanager
def watched(group: WatchedCommunicator, count: int, whom: str) -> Iterator[None]:
    """Abort `group` if the block, which moves `count` bytes, takes too long: its NCCL calls end by that.

    Raises EngineError then. After any error the group is closed: nobody knows how far the other side got.
    """
    deadline_s = transfer_deadline_s(count)
    late = threading.Event()

    def give_up() -> None:
        late.set()
        group.destroy()

    watch = threading.Timer(deadline_s, give_up)
    watch.daemon = True
    watch.start()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        group.destroy()
    finally:
        watch.cancel()
    if late.is_set():
        how = f"NCCL waited {deadline_s:.1f} s for {whom} in the midst of a transfer, and was given up"
        raise EngineError(how) from failure
    if failure is not None:
        raise failure


def _is_pin(name: str) -> bool:
    return name.startswith("NCCL_") and not name.startswith(_OWN)
