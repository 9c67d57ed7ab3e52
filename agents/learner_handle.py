"""The host's side of a learner: batches and a weight-sync client go in, metrics and manifests come out."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from rlenv.agents.learner_types import LearnerConfig, Scoring, StepMetrics
from rlenv.agents.packing import Batch, FloatArray
from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.threads import in_thread
from rlenv.errors import ConfigError, EngineError, LearnerError

CLIENT_METHODS = frozenset(
    ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
)
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


class LearnerHandle:
    """A learner in a process of its own, which starts at once and ends with this one; a WeightSender.

    `step`, `score` and `save` are awaited, `send` and `logprobs` block (an engine calls them off its event loop);
    requests are served one after another. All raise LearnerError with the child's traceback, or with its
    exit code and the end of its log when it died; a setting that cannot work raises ConfigError. `log` is
    the file for what the process prints. `version` is that of the weights after the last finished step.

    >>> learner = LearnerHandle(LearnerConfig("path/to/model"))
    >>> await learner.ready()
    >>> metrics = await learner.step(batch)
    >>> learner.close()
    """

    def __init__(self, config: LearnerConfig, *, log: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.version = 0
        self.scoring = config.scoring
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

    async def ready(self) -> None:
        """Wait until the model is loaded; whatever is asked sooner waits for it, too."""
        await in_thread(self._call, "ready")

    def check(self) -> None:
        """Raise LearnerError if the process has ended: nobody need wait for data to give it."""
        if not self._closed and self._process.poll() is not None:
            raise self._death("a wait for data")

    async def step(self, batch: Batch) -> StepMetrics:
        """One update of the policy: its version grows by one. A cancelled wait leaves the update going on."""
        metrics: StepMetrics = await in_thread(self._call, "step", batch)
        self.version = metrics.version
        return metrics

    async def score(self, batch: Batch, scoring: Scoring | None = None) -> FloatArray:
        """Log-probs [L] of the batch's live ids, as an update computes them, or by another `scoring`."""
        scores: FloatArray = await in_thread(self._call, "score", batch, scoring)
        return scores

    async def save(self, folder: Path) -> None:
        """Write model and tokenizer, loadable by transformers; the folder appears whole or not at all."""
        await in_thread(self._call, "save", str(folder))

    def send(self, client: WeightSyncClient) -> Manifest:
        """Let the learner's process send its weights; it reaches `client` through this one.

        An error that `client` raises comes out of here as it is, an EngineError if the engine did not take part.
        """
        return self._call("send", client.peer, client=client)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs [n - 1] of ids 1..n-1 of each sequence, fp32, at temperature 1, under the weights last sent.

        Raises LearnerError once a later step has changed them.
        """
        return self._call("logprobs", [list(ids) for ids in sequences])

    def close(self) -> None:
        """End the process, whatever it is doing. Closing twice is closing once."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:  # whoever waits for an answer has noticed by now, or soon will
            self._connection.close()
            self._log.close()

    def _call(self, name: str, *arguments: Any, client: WeightSyncClient | None = None) -> Any:
        refusal: Exception | None = None
        with self._lock:
            self._put((name, arguments), name)
            while True:
                kind, *content = self._get(name)
                if kind == "call":
                    reply, error = _relay(client, *content)
                    refusal = refusal or error
                    self._put(reply, name)
                elif kind == "value":
                    return content[0]
                elif kind == "config":
                    raise ConfigError(content[0])
                elif kind == "engine":
                    raise refusal or EngineError(content[0])
                else:
                    raise refusal or LearnerError(f"the learner failed in {name}:\n{content[0]}")

    def _put(self, message: tuple[Any, ...], name: str) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._death(name) from error

    def _get(self, name: str) -> tuple[Any, ...]:
        try:
            # End of file alone is not enough: a forked child of this process may keep the socket open.
            while not self._connection.poll(DEATH_CHECK_S):
                if self._process.poll() is not None:
                    raise self._death(name)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(name) from error

    def _death(self, name: str) -> LearnerError:
        if self._closed:
            return LearnerError(f"the learner was closed: no {name}")
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return LearnerError(f"the learner's process hung up during {name}\n{self._log_tail()}")
        return LearnerError(f"the learner's process ended with code {code} during {name}\n{self._log_tail()}")

    def _log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace")


def _relay(
    client: WeightSyncClient | None, method: str, arguments: tuple[Any, ...]
) -> tuple[tuple[str, Any], Exception | None]:
    """The reply to the sender, and the error behind it: the sender is told first, and may clean up."""
    assert client is not None and method in CLIENT_METHODS, f"{method} is no part of a weight update"
    try:
        return ("value", getattr(client, method)(*arguments)), None
    except Exception as error:
        return ("error", repr(error)), error


def _environment(config: LearnerConfig) -> dict[str, str]:
    """This process's variables, less those of a launcher, which would make the learner wait for other ranks.

    A learner with a GPU of its own sees no other, so that whatever it runs computes there.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    if config.gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(config.gpu + 1)]
        if config.gpu >= len(names):
            raise ConfigError(f"the learner cannot have GPU {config.gpu}: CUDA_VISIBLE_DEVICES={visible} hides it")
        kept["CUDA_VISIBLE_DEVICES"] = names[config.gpu]
    return kept | {"OMP_NUM_THREADS": str(config.threads)}
