"""A task's spec goes in, an environment comes out that runs in a process of its own and is ended when it hangs.

A thread cannot be stopped, so an environment that may loop, leak or crash needs a process that can. Workers are
forked from a small server that has imported rlenv and nothing of the caller, so that a fork copies no engine.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded

from rlenv.errors import ConfigError, EnvError
from rlenv.limit import make_env

_CONTEXT = multiprocessing.get_context("forkserver")
_START_LIMIT_S = 120.0  # imports and data, and the server's own start

Step = tuple[str, float, bool, bool, dict[str, Any]]


class IsolatedEnv(gymnasium.Env[str, str]):
    """`make_env(spec, **kwargs)` in a worker process; `reset` and `step` take at most `timeout_s` seconds.

    When one takes longer, or the process dies, the episode has no verdict: its last step is truncated, and
    `info["failure"]` says "timeout" or "died". The worker is gone then; the next `reset` starts another (with
    a seed, its random stream is the same as ever). An exception of the environment arrives as itself.

    Raises EnvError when the environment cannot be started.
    """

    def __init__(self, spec: EnvSpec, kwargs: dict[str, Any], *, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"step_timeout_s={timeout_s} leaves no time to step: give seconds, or None for no limit")
        self.timeout_s = timeout_s
        self._made_from = (spec, kwargs)
        self._lock = threading.Lock()
        self._worker: tuple[multiprocessing.process.BaseProcess, Connection] | None = None
        self._failure = ""  # why the worker is gone
        self.spec, self.observation_space, self.action_space = self._launch()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        with self._lock:
            if self._worker is None:
                self._launch()
            try:
                answer: tuple[str, dict[str, Any]] = self._ask("reset", {"seed": seed, "options": options})
            except _Lost:
                return "", {"failure": self._failure}
            return answer

    def step(self, action: str) -> Step:
        with self._lock:
            try:
                if self._worker is not None:
                    answer: Step = self._ask("step", {"action": action})
                    return answer
            except _Lost:
                pass
            if not self._failure:
                raise ResetNeeded("the environment is closed: call reset() to start it again")
            return "", 0.0, False, True, {"failure": self._failure}

    def close(self) -> None:
        """End the worker, in the middle of a step as well."""
        self._end("")

    def _launch(self) -> Any:
        """Start a worker; what it sends first: its spec and its two spaces."""
        _CONTEXT.set_forkserver_preload(["rlenv"])
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(theirs, *self._made_from), daemon=True, name="rlenv env")
        process.start()
        theirs.close()
        self._worker, self._failure = (process, ours), ""
        try:
            return self._ask("describe", {}, _START_LIMIT_S)
        except _Lost:
            raise EnvError(f"the process of {self._made_from[0].id} did not start: {self._failure}") from None
        except BaseException:
            self._end("")
            raise

    def _ask(self, call: str, arguments: dict[str, Any], limit_s: float | None = None) -> Any:
        """The worker's answer, or the environment's exception; raises _Lost when there will be none."""
        assert self._worker is not None
        _, connection = self._worker
        try:
            connection.send((call, arguments))
            in_time = connection.poll(self.timeout_s if limit_s is None else limit_s)
            answer, error = connection.recv() if in_time else (None, None)
        except (EOFError, OSError):
            self._end("died")
            raise _Lost from None
        except BaseException:
            self._end("interrupted")  # the reply would answer the next call
            raise
        if not in_time:
            self._end("timeout")
            raise _Lost
        if error is not None:
            raise error
        return answer

    def _end(self, failure: str) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._failure = failure
            process, connection = worker
            process.kill()
            process.join()
            connection.close()


class _Lost(Exception):
    """The worker is gone."""


def _serve(connection: Connection, spec: EnvSpec, kwargs: dict[str, Any]) -> None:
    """The worker's whole life: make the environment, then answer (call, arguments) with (answer, error)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    env: gymnasium.Env[str, str] | None = None
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:
            return
        try:
            if env is None:
                env = make_env(spec, **kwargs)
            if call == "describe":
                connection.send(((env.spec, env.observation_space, env.action_space), None))
            else:
                connection.send((getattr(env, call)(**arguments), None))
        except Exception as error:
            error.add_note(f"in the environment's process:\n{traceback.format_exc()}")
            _send_error(connection, error)


def _send_error(connection: Connection, error: Exception) -> None:
    try:
        pickle.loads(pickle.dumps(error))  # some can be packed and not unpacked
    except Exception:
        error = EnvError(f"{type(error).__name__}: {error}")
    connection.send((None, error))


def _end_with_parent() -> None:
    """A worker that never returns to its pipe must not outlive whoever started it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
