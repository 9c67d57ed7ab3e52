"""A learner in an actor that Ray places: batches go in, metrics come out, weights go from there to the engines.

driver   RayLearner · engine's updater         calls of the sender come back here, and go on to the engine
   │ Ray
actor    learner, sender                       the values themselves go by the weight transfer, not through Ray
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import traceback
import weakref
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlenv.agents.learner_handle import LearnerHandle
from rlenv.agents.learner_link import is_of_launcher
from rlenv.agents.learner_process import serve
from rlenv.agents.learner_types import LearnerConfig
from rlenv.errors import ConfigError

START_S = 600.0  # for Ray to place the actor
NOTICE_S = 5.0  # for Ray to say why it ended
# A thread each for `live`, `get`, `put` and `pid`; a learner that Ray began anew would have forgotten what it learned.
_OURS = {"max_concurrency": 4, "max_restarts": 0, "max_task_retries": 0}


class RayLearner(LearnerHandle):
    """A learner on whichever machine of the cluster has what `actor` asks for; otherwise as `LearnerHandle`.

    `actor`: options of the Ray actor, such as `{"num_gpus": 1}`: the learner's GPU is the one that Ray gives it. The
    machine needs rlenv and the model under the same name. `ray.init` comes first; raises ConfigError without.
    """

    def __init__(self, config: LearnerConfig, *, actor: Mapping[str, Any] | None = None) -> None:
        if not ray.is_initialized():
            raise ConfigError("Ray is not there: call ray.init() first, or ray.init(address='auto') on a cluster")
        if config.gpu is not None:
            raise ConfigError(f"Ray chooses the learner's GPU: leave gpu={config.gpu} out")
        super().__init__(config, link=RayLink(config, actor or {}))


class RayLink:
    """The way to the learner's actor. Messages go pickled: Ray itself would hand on arrays that nobody may write to."""

    def __init__(self, config: LearnerConfig, actor: Mapping[str, Any]) -> None:
        self._options = {"num_cpus": 1, **actor, **_OURS}
        host: Any = ray.remote(**self._options)(LearnerActor)
        self._actor = host.remote(config)
        self._life = self._actor.live.remote()  # comes back only with the end of the actor, or of its learner
        self._unplaced = False
        self._kill = weakref.finalize(self, _kill, self._actor)

    @property
    def pid(self) -> int:
        return int(self._ask("pid"))

    def put(self, message: tuple[Any, ...]) -> None:
        try:
            self._ask("put", pickle.dumps(message), timeout=START_S)
        except ConnectionError as error:
            if isinstance(error.__cause__, GetTimeoutError):  # what comes late would be taken for another's answer
                self._unplaced = True
                self._kill()
            raise

    def get(self) -> tuple[Any, ...]:
        answer: tuple[Any, ...] = pickle.loads(self._ask("get"))
        return answer

    def has_ended(self) -> bool:
        return self._unplaced or not ray.is_initialized() or bool(ray.wait([self._life], timeout=0)[0])

    def death(self, during: str) -> str:
        if self._unplaced:
            return f"Ray did not place the learner in {START_S:.0f} s: has it {self._options}?"
        if not ray.is_initialized():
            return f"Ray was shut down before the learner: no {during}"
        try:
            ray.get(self._life, timeout=NOTICE_S)
        except RayError as error:
            return f"the learner's actor ended during {during}: {error}"
        return f"the learner's actor ended during {during}"

    def end(self) -> None:
        self._kill()

    def close(self) -> None:
        """Nothing is left: Ray has ended the process."""

    def _ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        if not ray.is_initialized():  # Ray would start another one
            raise ConnectionError
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout)
        except RayError as error:
            raise ConnectionError from error


def _kill(actor: Any) -> None:
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):  # of a Ray that was shut down and started anew
            ray.kill(actor)


class LearnerActor:
    """The actor: serves a learner on a thread, and passes its messages on."""

    def __init__(self, config: LearnerConfig) -> None:
        for name in filter(is_of_launcher, list(os.environ)):
            del os.environ[name]
        self._channel, self._end = _Queues(), ""
        self._serving = threading.Thread(target=self._serve, args=(config,), daemon=True)
        self._serving.start()

    def put(self, message: bytes) -> None:
        self._channel.requests.put(message)

    def get(self) -> bytes:
        answer = self._channel.answers.get()
        if not answer:
            self._channel.answers.put(answer)  # for whoever asks next
            raise RuntimeError(self._end)
        return answer

    def pid(self) -> int:
        return os.getpid()

    def live(self) -> None:
        self._serving.join()
        raise RuntimeError(self._end)

    def _serve(self, config: LearnerConfig) -> None:
        try:
            serve(self._channel, config)
        except BaseException:  # what cannot be pickled, or SystemExit: the driver is to hear of it
            self._end = traceback.format_exc()
        finally:
            self._channel.answers.put(b"")


class _Queues:
    """What `serve` takes for its connection."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[bytes] = SimpleQueue()
        self.answers: SimpleQueue[bytes] = SimpleQueue()

    def recv(self) -> tuple[Any, ...]:
        request: tuple[Any, ...] = pickle.loads(self.requests.get())
        return request

    def send(self, message: tuple[Any, ...], /) -> None:
        self.answers.put(pickle.dumps(message))
