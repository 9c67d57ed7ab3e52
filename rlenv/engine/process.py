"""vLLM's processes: arguments go in, a running AsyncLLM comes out, and whatever becomes of it, no process is left.

this process ─ EngineCore (scheduler) ─ Worker (model)       each ends when the one before it does (`plugin`)
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import psutil

from rlenv.engine.transfer.plugin import SCRATCH
from rlenv.errors import EngineError

# A launcher's variables would make vLLM's children join the learner's process group.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork after torch has run can hang
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",  # each reload of the weights makes primitives anew: 1024 fill 400 MiB
    "VLLM_NO_USAGE_STATS": "1",
}
_TORCH_ON_TRITON = "torch._library.triton"  # the logger by which torch warns that a CPU has no Triton
_QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": f"-{_TORCH_ON_TRITON}"}
_CORE, _WORKER = "EngineCore", "::Worker"  # in the names by which vLLM's processes go
SHUTDOWN_S = 20.0  # a worker takes some seconds to unload torch
TERMINATE_S = 5.0  # a process that is only starting
_POLL_S = 0.1
_one_start = threading.Lock()  # a start changes this process's environment for a while


@dataclass(frozen=True, slots=True)
class VLLMProcesses:
    """A running AsyncLLM, every process below it, and what they leave behind if nobody clears it away.

    `vital` are the processes whose end is the engine's: the core and its workers. Others, such as helpers that compile
    kernels, come and go. `sockets` is a folder, `shared` names the shared memory between core and workers.
    """

    llm: Any
    family: tuple[psutil.Process, ...]
    vital: tuple[psutil.Process, ...]
    sockets: str
    shared: frozenset[str]

    @property
    def is_dead(self) -> bool:
        return bool(self.llm.errored) or not all(map(_runs, self.vital))

    def fail_calls(self) -> None:
        """Let every call to vLLM fail, also those that wait: vLLM itself leaves some of them waiting for ever."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        core = self.llm.engine_core
        core.resources.engine_dead = True
        for answer in core.utility_results.values():
            if not answer.done():
                answer.set_exception(VLLMEngineDeadError())

    def end(self) -> None:
        """End all processes, whatever state they are in. Blocks for some seconds; ending twice is ending once."""
        if self.is_dead:
            self._kill()  # the rest would only be waited for
        self.llm.shutdown(timeout=SHUTDOWN_S)
        self.llm.shutdown = _nothing  # its finaliser calls it again at interpreter exit, when half of vLLM is gone
        self._kill()
        deadline = time.monotonic() + TERMINATE_S
        while any(map(_runs, self.family)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for name in self.shared:
            _unlink(name)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _kill(self) -> None:
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class VLLMStart:
    """One start of vLLM, which blocks its thread and can be given up from another."""

    def __init__(self, arguments: dict[str, Any], transport: str, environment: dict[str, str]) -> None:
        self._arguments, self._transport, self._environment = arguments, transport, environment
        self._given_up = False
        self._started: VLLMProcesses | None = None
        self._ended = threading.Event()
        self._elders: set[BaseProcess] | None = None  # children that this process had before, once the start begins

    def run(self) -> VLLMProcesses:
        """Start. Raises EngineError if vLLM does not start, or if the start was given up."""
        try:
            with self._turn():
                self._started = self._start()
            return self._started
        finally:
            self._ended.set()

    def give_up(self) -> None:
        """End a start that is under way; returns when nothing is left of it."""
        self._given_up = True
        patience = time.monotonic() + TERMINATE_S
        while not self._ended.wait(_POLL_S):
            if self._elders is not None:
                for child in set(multiprocessing.active_children()) - self._elders:
                    if child.name.startswith(_CORE):
                        child.terminate() if time.monotonic() < patience else child.kill()
        if self._started is not None:
            self._started.end()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        while not _one_start.acquire(timeout=_POLL_S):
            if self._given_up:
                raise self._failed("the start was given up")
        try:
            yield
        finally:
            _one_start.release()

    def _start(self) -> VLLMProcesses:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        sockets = tempfile.mkdtemp(prefix="rlenv-engine-", dir=os.environ.get("VLLM_RPC_BASE_PATH"))
        try:
            llm, cores = self._start_llm({**self._environment, "VLLM_RPC_BASE_PATH": sockets, SCRATCH: sockets})
        except BaseException:
            shutil.rmtree(sockets, ignore_errors=True)
            raise
        family, vital = family_of(core.pid for core in cores if core.name.startswith(_CORE))
        return VLLMProcesses(llm, family, vital, sockets, _shared_memory(family))

    def _start_llm(self, environment: dict[str, str]) -> tuple[Any, set[BaseProcess]]:
        with _children_environment(environment), _without_main(), _quiet_imports():
            from vllm import AsyncEngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.v1.engine.async_llm import AsyncLLM

            transfer = WeightTransferConfig(backend=self._transport)
            self._elders = set(multiprocessing.active_children())
            if self._given_up:
                raise self._failed("the start was given up")
            try:
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments, weight_transfer_config=transfer))
            except Exception as error:
                raise self._failed(str(error)) from error
            finally:
                elders, self._elders = self._elders, None
        return llm, set(multiprocessing.active_children()) - elders

    def _failed(self, how: str) -> EngineError:
        return EngineError(f"vLLM did not start for {self._arguments['model']!r}: {how}")


def check_plugin() -> None:
    """Raise EngineError if vLLM would not load our plug-in: it tells nobody."""
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "rlenv" not in names:
        raise EngineError("vLLM cannot find rlenv's plug-in: install the package (pip install -e .) first")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "rlenv" not in allowed.split(","):
        raise EngineError(f"VLLM_PLUGINS={allowed!r} keeps rlenv's plug-in out: add 'rlenv' to it")


def server_environment(extra: dict[str, str]) -> dict[str, str]:
    """The whole environment of a vLLM server that this process starts."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    return _DEFAULTS | inherited | extra | _QUIET


def family_of(cores: Iterable[int | None]) -> tuple[tuple[psutil.Process, ...], tuple[psutil.Process, ...]]:
    """All processes of the engines whose cores have these ids, and those among them that are vital."""
    family: list[psutil.Process] = []
    vital: list[psutil.Process] = []
    for pid in cores:
        with contextlib.suppress(psutil.NoSuchProcess):
            core = psutil.Process(pid)
            family += [core, *core.children(recursive=True)]
            vital += [core, *filter(_is_worker, core.children())]
    return tuple(family), tuple(vital)


def _is_worker(process: psutil.Process) -> bool:
    """Whether this child of a core calls itself `VLLM::Worker`, as workers do before the core serves."""
    try:
        return any(_WORKER in title for title in process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return False


def _shared_memory(family: Iterable[psutil.Process]) -> frozenset[str]:
    """The names of the segments that Python made for these processes."""
    folder = "/dev/shm/"
    areas = {area.path for process in family for area in process.memory_maps() if area.path.startswith(f"{folder}psm_")}
    return frozenset(path.removeprefix(folder) for path in areas)


def _unlink(name: str) -> None:
    """Remove a segment of shared memory, unless the process that made it did so itself."""
    with contextlib.suppress(FileNotFoundError):
        segment = SharedMemory(name)
        segment.close()
        segment.unlink()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # nobody need collect an orphan
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def _children_environment(extra: dict[str, str]) -> Iterator[None]:
    """What vLLM's processes inherit: no launcher's variables, no warnings of libraries about one another."""
    saved = dict(os.environ)
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(extra | _QUIET)
    try:
        yield
    finally:
        for name in {*_LAUNCHER, *extra, *_QUIET}:
            if name in saved:
                os.environ[name] = saved[name]
            else:
                os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """The same for what this process imports."""
    logger = logging.getLogger(_TORCH_ON_TRITON)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep spawned children from running the user's script again, which need not have a `__main__` guard."""
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in saved:
        del main.__file__
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(main, name, value)


def _nothing(timeout: float | None = None) -> None:
    """Stands in for a shutdown that has happened."""
