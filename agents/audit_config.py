"""What a person types becomes one checked `AuditConfig`, or a `ConfigError` that says what to type instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from rlenv.agents.learner_types import Scoring
from rlenv.engine.backend import Backend
from rlenv.engine.base import PauseMode
from rlenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """What to audit. The defaults are those of training; anything else is measured and, if wrong, named."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Folder of a transformers model, or its name on the Hub. Left out, the tiny model that ships with rlenv."""
    task: str = "math-v0"
    """Task whose prompts are continued."""
    tokens: int = 4096
    """Ids to sample on the task, at least."""
    max_tokens: int = 128
    """Most ids sampled in a turn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    pause: PauseMode = "keep"
    clear_cache: bool = True
    backend: Backend = field(default_factory=Backend)
    """The engine's side."""
    scoring: Scoring = field(default_factory=Scoring)
    """The learner's side."""
    full: bool = False
    """Start further engines, to switch what an engine decides at its start: head, scheduling, chunked prefill."""
    lr: float = 5e-5
    """Learning rate of the one optimizer step that prices staleness."""
    seed: int = 0
    out: str | None = None
    """Folder for audit.json and audit.png."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}: type --temperature with a number above 0")
        if self.tokens < 1 or self.max_tokens < 1:
            raise ConfigError("--tokens and --max-tokens must be 1 or more")
