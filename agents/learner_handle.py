"""The host's side of a learner: batches and a weight-sync client go in, metrics and manifests come out."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlenv.agents.learner_link import Link, ProcessLink
from rlenv.agents.learner_types import LearnerConfig, Scoring, StepMetrics
from rlenv.agents.packing import Batch, FloatArray
from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.threads import in_thread
from rlenv.errors import ConfigError, EngineError, LearnerError

CLIENT_METHODS = frozenset(
    ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
)


class LearnerHandle:
    """A learner in a process of its own, which starts at once and ends with this one; a WeightSender.

    `step`, `score` and `save` are awaited, `send` and `logprobs` block (an engine calls them off its event loop);
    requests are served one after another. All raise LearnerError with the child's traceback, or with its
    exit code and the end of its log when it died; a setting that cannot work raises ConfigError. `log` is
    the file for what the process prints; a `link` reaches a learner elsewhere (`RayLearner`). `version` is that of the
    weights after the last finished step.

    >>> learner = LearnerHandle(LearnerConfig("path/to/model"))
    >>> await learner.ready()
    >>> metrics = await learner.step(batch)
    >>> learner.close()
    """

    def __init__(self, config: LearnerConfig, *, log: Path | None = None, link: Link | None = None) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.version = 0
        self.scoring = config.scoring
        self._link = link or ProcessLink(config, log)

    @property
    def pid(self) -> int:
        """Of the learner's process, on its machine."""
        try:
            return self._link.pid
        except ConnectionError as error:
            raise self._death("pid") from error

    async def ready(self) -> None:
        """Wait until the model is loaded; whatever is asked sooner waits for it, too."""
        await in_thread(self._call, "ready")

    def check(self) -> None:
        """Raise LearnerError if the process has ended: nobody need wait for data to give it."""
        if not self._closed and self._link.has_ended():
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
        await in_thread(lambda: self._call("save", os.path.abspath(folder)))  # it may work in another folder

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
        self._link.end()
        with self._lock:  # whoever waits for an answer has noticed by now, or soon will
            self._link.close()

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
            self._link.put(message)
        except ConnectionError as error:
            raise self._death(name) from error

    def _get(self, name: str) -> tuple[Any, ...]:
        try:
            return self._link.get()
        except ConnectionError as error:
            raise self._death(name) from error

    def _death(self, name: str) -> LearnerError:
        return LearnerError(f"the learner was closed: no {name}" if self._closed else self._link.death(name))


def _relay(
    client: WeightSyncClient | None, method: str, arguments: tuple[Any, ...]
) -> tuple[tuple[str, Any], Exception | None]:
    """The reply to the sender, and the error behind it: the sender is told first, and may clean up."""
    assert client is not None and method in CLIENT_METHODS, f"{method} is no part of a weight update"
    try:
        return ("value", getattr(client, method)(*arguments)), None
    except Exception as error:
        return ("error", repr(error)), error
