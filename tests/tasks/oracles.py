"""How each task is solved: an environment in an episode goes in, the action with the full reward comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium


def boxed(env: gymnasium.Env[str, Any]) -> str:
    return f"It is \\boxed{{{env.unwrapped.answer}}}."


ORACLES: dict[str, Callable[[gymnasium.Env[str, Any]], str]] = {
    "rlenv/math-v0": boxed,
    "rlenv/math-retry-v0": boxed,
    "rlenv/word-problems-v0": boxed,
}
# All answers that a task could ask for, at once, in the ways in which a policy might try it.
GUESSES = range(-100, 1000)
ALL_AT_ONCE = (
    " ".join(f"\\boxed{{{guess}}}" for guess in GUESSES),
    " ".join(f"\\boxed{{{guess}}}" for guess in reversed(GUESSES)),
    f"\\boxed{{{', '.join(map(str, GUESSES))}}}",
    f"\\boxed{{{' '.join(map(str, GUESSES))}}}",
    f"\\boxed{{{''.join(f'{{{guess}}}' for guess in GUESSES)}}}",
    " ".join(map(str, GUESSES)),
)
