"""Which of vLLM's processes an engine lives by, on stand-ins for them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from rlenv.engine.process import VLLMProcesses, family_of

CORE = """
import subprocess, sys, time, setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
worker = "import setproctitle, subprocess, time; setproctitle.setproctitle('VLLM::Worker_TP0'); {}; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", worker.format("subprocess.Popen(['sleep', '601'])")])
subprocess.Popen(["sleep", "602"])
time.sleep(600)
"""
MEMBERS = ("VLLM::EngineCore", "VLLM::Worker_TP0", "sleep 601", "sleep 602")  # helpers: of the worker, of the core


@dataclass
class Silent:
    """An AsyncLLM that notices nothing; it may be told to end, with some patience, as often as one likes."""

    errored: bool = False

    def shutdown(self, timeout: float) -> None:
        assert timeout > 0


@dataclass(frozen=True)
class Running:
    """An engine's processes, and each of them by name."""

    processes: VLLMProcesses
    members: dict[str, psutil.Process]

    def kill(self, name: str) -> None:
        self.members[name].kill()
        deadline = time.monotonic() + 10
        while _runs(self.members[name]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A core with a worker, helpers of both, a socket and a piece of shared memory."""
    core = subprocess.Popen([sys.executable, "-c", CORE])
    deadline = time.monotonic() + 20
    while not (members := _members(core.pid)).keys() >= set(MEMBERS):
        assert time.monotonic() < deadline, members
        time.sleep(0.01)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    (sockets / "socket").touch()
    shared = SharedMemory(create=True, size=8)
    shared.close()
    processes = VLLMProcesses(Silent(), *family_of([core.pid]), str(sockets), frozenset([shared.name]))
    yield Running(processes, members)
    processes.end()
    core.wait()


def test_an_engine_outlives_its_helpers(running: Running) -> None:
    for helper in MEMBERS[2:]:
        running.kill(helper)
        assert not running.processes.is_dead


@pytest.mark.parametrize("victim", MEMBERS[:2])
def test_an_engine_dies_with_its_core_or_a_worker(running: Running, victim: str) -> None:
    assert not running.processes.is_dead
    running.kill(victim)
    assert running.processes.is_dead


@pytest.mark.parametrize("dead", [False, True])
def test_an_end_leaves_no_process_no_socket_and_no_shared_memory(running: Running, dead: bool) -> None:
    if dead:
        running.kill(MEMBERS[1])
    for _ in range(2):
        running.processes.end()
        assert len(running.processes.family) == 4 and not any(map(_runs, running.processes.family))
        assert not Path(running.processes.sockets).exists()
        with pytest.raises(FileNotFoundError):
            SharedMemory(*running.processes.shared)


def _members(core_pid: int) -> dict[str, psutil.Process]:
    core = psutil.Process(core_pid)
    return {" ".join(process.cmdline()).strip(): process for process in (core, *core.children(recursive=True))}


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
