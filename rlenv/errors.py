"""The exception tree. A caller's mistake is a `ValueError` that says what to type instead.

RlenvError
├── ConfigError (ValueError)        a setting that cannot work
│   └── UnknownTaskError            no such task; names the nearest
├── EnvError (RuntimeError)         an environment's process could not start
├── GroupError (RuntimeError)       every rollout failed: nothing to train on
├── AuditError (RuntimeError)       engine and learner do not compute the same: nothing sound to train on
├── CollapseError (RuntimeError)    sampling and learning parted ways, and the run was to stop then
├── EngineError (RuntimeError)      the rollout engine cannot go on
│   ├── AbortedError                it aborted this request
│   ├── EngineDeadError             its process died
│   └── WeightUpdateError           weights that were sent are not the weights that serve
└── LearnerError (RuntimeError)     the learner's process failed
"""

from __future__ import annotations


class RlenvError(Exception):
    """The root of every error that rlenv raises itself."""


class ConfigError(RlenvError, ValueError):
    """A setting that cannot work; the message says what to type instead."""


class UnknownTaskError(ConfigError):
    """No task has that id; the message names the nearest ones."""


class EnvError(RlenvError, RuntimeError):
    """An environment's process could not start, or raised what cannot be sent; the message names it."""


class GroupError(RlenvError, RuntimeError):
    """Every rollout failed, so that there is nothing to train on."""


class AuditError(RlenvError, RuntimeError):
    """Engine and learner disagree about the same ids under the same weights; the message names each cause."""


class CollapseError(RlenvError, RuntimeError):
    """The ratios of an update are out of bounds, and the run was to stop when they are; the message has the figures."""


class EngineError(RlenvError, RuntimeError):
    """The rollout engine cannot go on."""


class AbortedError(EngineError):
    """The engine aborted this request; what it had sampled is not an answer."""


class EngineDeadError(EngineError):
    """The engine's process died; the message names the engine."""


class WeightUpdateError(EngineError):
    """The weights that were sent are not the weights that serve.

    `version` is the update's, `what` the tensor or canary that disagreed, `size` by how much (nats for
    a canary, values for a tensor).
    """

    def __init__(self, message: str, *, version: int, what: str, size: float) -> None:
        super().__init__(message)
        self.version, self.what, self.size = version, what, size


class LearnerError(RlenvError, RuntimeError):
    """The learner's process failed; the message carries its traceback."""
