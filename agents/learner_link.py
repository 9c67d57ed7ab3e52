"""Messages to a learner go in, its answers come out: by a socket to a process that ends with this one, or otherwise."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

from rlenv.agents.learner_types import LearnerConfig
from rlenv.errors import ConfigError

LAUNCHER_VARIABLES = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
LAUNCHER_PREFIXES = (
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "ACCELERATE_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "MV2_COMM_WORLD_",
)
DEATH_CHECK_S = 0.5
CLOSE_S = 2.0
LOG_TAIL = 4000  # bytes


class Link(Protocol):
    """The way to a learner elsewhere. `put` and `get` raise ConnectionError once it has ended."""

    @property
    def pid(self) -> int:
        """Of its process, on its machine."""

    def put(self, message: tuple[Any, ...]) -> None:
        """Send a request, or a reply to a call."""

    def get(self) -> tuple[Any, ...]:
        """Wait for a call or an answer."""

    def has_ended(self) -> bool:
        """Whether it ended by itself."""

    def death(self, during: str) -> str:
        """How it ended, in words."""

    def end(self) -> None:
        """End it, whatever it is doing; whoever waits in `get` hears of it."""

    def close(self) -> None:
        """Nobody waits any more: leave nothing behind."""


class ProcessLink:
    """A process of this machine, which starts at once and ends with this one. `log` is the file for what it prints."""

    def __init__(self, config: LearnerConfig, log: Path | None = None) -> None:
        self._log: IO[bytes] = log.open("w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115 - until close
        self._connection: Connection[Any, Any]
        self._connection, child = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlenv.agents.learner_process", str(child.fileno()), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[child.fileno()],
            env=_environment(config),
            start_new_session=True,  # a terminal's Ctrl-C reaches the host only
        )
        child.close()
        self._connection.send(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise ConnectionError from error

    def get(self) -> tuple[Any, ...]:
        try:
            # End of file alone is not enough: a forked child of this process may keep the socket open.
            while not self._connection.poll(DEATH_CHECK_S):
                if self.has_ended():
                    raise ConnectionError
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ConnectionError from error

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def death(self, during: str) -> str:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return f"the learner's process hung up during {during}\n{self._log_tail()}"
        return f"the learner's process ended with code {code} during {during}\n{self._log_tail()}"

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self._connection.close()
        self._log.close()

    def _log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace")


def is_of_launcher(variable: str) -> bool:
    """Whether a launcher of several processes set it: a learner that saw it would wait for other ranks."""
    return variable in LAUNCHER_VARIABLES or variable.startswith(LAUNCHER_PREFIXES)


def _environment(config: LearnerConfig) -> dict[str, str]:
    """This process's variables, less those of a launcher.

    A learner with a GPU of its own sees no other, so that whatever it runs computes there.
    """
    kept = {name: value for name, value in os.environ.items() if not is_of_launcher(name)}
    if config.gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(config.gpu + 1)]
        if config.gpu >= len(names):
            raise ConfigError(f"the learner cannot have GPU {config.gpu}: CUDA_VISIBLE_DEVICES={visible} hides it")
        kept["CUDA_VISIBLE_DEVICES"] = names[config.gpu]
    return kept | {"OMP_NUM_THREADS": str(config.threads)}
