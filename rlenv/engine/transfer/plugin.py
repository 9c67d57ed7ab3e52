"""vLLM calls `register` in each of its processes; afterwards our weight-transfer backends exist there, and each child
process ends when its parent does.

vLLM swallows an error raised here and lets `VLLM_PLUGINS` filter entry points, so `VLLMEngine` probes at start
whether the backend arrived.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import threading
import time

import psutil

PARENT_CHECK_S = 1.0
_WITHOUT_PLUGIN = "VLLM::DPCoord"  # the one vLLM process that loads no plug-in; it starts before the cores do
SHARED_MEMORY = "shm"
IPC = "rlenv_ipc"
NCCL = "rlenv_nccl"
EXTENSION = "rlenv.engine.transfer.worker.ProofExtension"  # what vLLM mixes into its workers
PARENT = "RLENV_SERVER_PARENT"  # in a server's environment: the process with which it ends
SCRATCH = "RLENV_SCRATCH"  # a folder that is removed by whoever outlives the process that made it
_BACKENDS = {
    SHARED_MEMORY: ("rlenv.engine.transfer.shm", "SharedMemoryWeightTransferEngine"),
    IPC: ("rlenv.engine.transfer.ipc", "PlainIPCWeightTransferEngine"),
    NCCL: ("rlenv.engine.transfer.nccl", "MeetingNCCLWeightTransferEngine"),
}


def register() -> None:
    """Make our backends known to vLLM's factory and watch the parent; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, engine) in _BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
    _end_with_parent()


def _end_with_parent() -> None:
    """A vLLM process whose parent was killed would wait for ever, holding its memory."""
    child = multiprocessing.parent_process()
    parent = child.pid if child is not None else int(os.environ.pop(PARENT, 0))  # not for its own children
    name = "rlenv parent watch"
    if parent and all(thread.name != name for thread in threading.enumerate()):
        scratch = os.environ.pop(SCRATCH, None)
        threading.Thread(target=_watch, args=(parent, scratch), name=name, daemon=True).start()


def _watch(parent_pid: int, scratch: str | None) -> None:
    siblings = _children_of(parent_pid)
    while os.getppid() == parent_pid:
        time.sleep(PARENT_CHECK_S)
    for sibling in siblings:
        with contextlib.suppress(psutil.NoSuchProcess):
            if sibling.name().startswith(_WITHOUT_PLUGIN):
                sibling.kill()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
