"""Environments and agents for reinforcement learning of language models on one shared rollout engine.

    env = rlenv.make("math-v0")                                     # a gymnasium.Env: text in, text out
    engine = rlenv.Engine("Qwen/Qwen3-0.6B")                        # one shared rollout engine
    envs = rlenv.make_vec("math-v0", num_envs=256, engine=engine)   # whose steps are one batch

Importing rlenv registers its tasks with Gymnasium and loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlenv.env import TextEnv, Turn
from rlenv.errors import (
    AbortedError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EnvError,
    GroupError,
    LearnerError,
    RlenvError,
    UnknownTaskError,
    WeightUpdateError,
)
from rlenv.registry import list_tasks as list
from rlenv.registry import make, make_vec, register, register_own_tasks, spec
from rlenv.types import Completion, Failure, Group, Message, Sample, Trajectory, VersionSpan

if TYPE_CHECKING:
    from rlenv.engine.vllm import VLLMEngine as Engine

__all__ = [
    "AbortedError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EnvError",
    "Failure",
    "Group",
    "GroupError",
    "LearnerError",
    "Message",
    "RlenvError",
    "Sample",
    "TextEnv",
    "Trajectory",
    "Turn",
    "UnknownTaskError",
    "VersionSpan",
    "WeightUpdateError",
    "list",
    "make",
    "make_vec",
    "register",
    "spec",
]

register_own_tasks()


def __getattr__(name: str) -> Any:
    if name == "Engine":  # imports vLLM, which takes seconds
        from rlenv.engine.vllm import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> Sequence[str]:
    return __all__
