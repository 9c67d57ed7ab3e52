"""Requests of a `LearnerHandle` enter through an inherited socket; their results, or a traceback, leave through it.

    host → child   (name, arguments)           "ready", "step", "score", "save", "send" or "logprobs"
    child → host   ("call", method, arguments) while sending: what the sender asks of the engine
    host → child   ("value", result) | ("error", text)
    child → host   ("value", result) | ("config", text) | ("engine", text) | ("error", traceback)

One request at a time. The process ends with its host, whatever either is doing: `python -m rlenv.agents.learner_process
DESCRIPTOR HOST_PID` watches its standard input, a pipe that the host never writes to, and its parent's id.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlenv.agents.learner_types import LearnerConfig, Scoring, StepMetrics
from rlenv.agents.packing import Batch, FloatArray
from rlenv.engine.base import Manifest, Peer
from rlenv.errors import ConfigError, EngineError, LearnerError

if TYPE_CHECKING:
    from rlenv.agents.learner import Learner

HOST_CHECK_S = 1.0


def main() -> None:
    descriptor, host_pid = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host decides what Ctrl-C means
    threading.Thread(target=_end_with_host, args=(host_pid,), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        serve(connection, connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the host hung up
        return


class Channel(Protocol):
    """What messages come and go by."""

    def send(self, message: tuple[Any, ...], /) -> None: ...
    def recv(self) -> tuple[Any, ...]: ...


class Server:
    """Answers requests for one learner and its sender."""

    def __init__(self, config: LearnerConfig, connection: Channel) -> None:
        self._connection = connection
        self._learner = _load(config)
        self._sent_version: int | None = None
        module, _, name = config.sender.partition(":")
        sender = getattr(importlib.import_module(module), name)
        self._sender = sender(self._learner.model, backend=config.transfer_backend, dtype=config.transfer_dtype, rank=0)

    def ready(self) -> None:
        """Nothing is left to do: whoever is asked has started."""

    def step(self, batch: Batch) -> StepMetrics:
        return self._learner.step(batch)

    def score(self, batch: Batch, scoring: Scoring | None) -> FloatArray:
        return self._learner.score(batch, scoring)

    def save(self, folder: str) -> None:
        self._learner.save(Path(folder))

    def send(self, peer: Peer) -> Manifest:
        client = RemoteClient(self._connection, peer)
        try:
            manifest: Manifest = self._sender.send(client)
        finally:
            client.end()
        self._sent_version = self._learner.version
        return manifest

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As WeightSender says: never those of weights that have moved on since."""
        if self._sent_version not in (None, self._learner.version):
            raise LearnerError(
                f"version {self._sent_version} was sent, but the learner is at {self._learner.version}: "
                "ask for its log-probs before the next step"
            )
        return self._learner.logprobs(sequences)


class RemoteClient:
    """The engine's weight-sync client, called in the host's process. A transport may call it from a thread."""

    def __init__(self, connection: Channel, peer: Peer) -> None:
        self.peer = peer
        self._connection, self._lock = connection, threading.Lock()
        self._ended = False

    def end(self) -> None:
        """Wait for a call that is still answered on another thread, and let none come later: the socket is one."""
        with self._lock:
            self._ended = True

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def _call(self, method: str, *arguments: Any) -> None:
        with self._lock:
            if self._ended:
                raise EngineError(f"{method}: this update of the weights has ended")
            self._connection.send(("call", method, arguments))
            kind, content = self._connection.recv()
        if kind == "error":
            raise RuntimeError(f"{method}: {content}")


def serve(connection: Channel, config: LearnerConfig) -> None:
    """Answer requests, one after another, for ever."""
    started = _attempt(Server, config, connection)
    while True:
        name, arguments = connection.recv()
        kind, server = started
        connection.send(_attempt(getattr(server, name), *arguments) if kind == "value" else started)


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "value", function(*arguments)
    except ConfigError as error:
        return "config", str(error)
    except EngineError as error:
        return "engine", str(error)
    except Exception:  # whatever a model, a loss or a transport raised is the host's to judge
        return "error", traceback.format_exc()


def _load(config: LearnerConfig) -> Learner:
    if config.device == "cpu":
        _leave_the_first_core()
    import torch
    import transformers

    from rlenv.agents.learner import Learner

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    return Learner(config)


def _leave_the_first_core() -> None:
    """An engine on the CPU binds itself to the first core, and would share it with the learner."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)


def _end_with_host(host_pid: int) -> None:
    # End of file tells at once. The parent's id tells, too, where a forked child of the host keeps the pipe open.
    while os.getppid() == host_pid:
        readable, _, _ = select.select([0], [], [], HOST_CHECK_S)
        if readable and not os.read(0, 1):
            break
    os._exit(0)


if __name__ == "__main__":
    main()
