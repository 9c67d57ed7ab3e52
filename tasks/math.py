"""A level and a split go in, seeded arithmetic problems with one exact integer answer come out.

Levels: 1 one-digit sums (100 problems), 2 two-digit sums (8,100), 3 two-digit differences (8,100), 4 two-digit
products (8,100), 5 a sum less a third operand (27,000). About one problem in ten belongs to the `eval` split,
chosen by a hash of its text, so that no text is ever in both.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal

from rlenv.env import TextEnv, Turn
from rlenv.errors import ConfigError

Split = Literal["train", "eval", "all"]

_LEVELS: dict[int, tuple[str, tuple[range, ...]]] = {
    1: ("{}+{}", (range(10), range(10))),
    2: ("{}+{}", (range(10, 100), range(10, 100))),
    3: ("{}-{}", (range(10, 100), range(10, 100))),
    4: ("{}*{}", (range(10, 100), range(10, 100))),
    5: ("{}+{}-{}", (range(10, 40), range(10, 40), range(10, 40))),
}
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_BOXED_INTEGER = re.compile(r"\\boxed\{\s*(-?[0-9]{1,18})\s*\}")
_MOST_ANSWERS = 3


class MathEnv(TextEnv):
    """One arithmetic problem, one answer. `reset(options={"index": i})` asks for the i-th problem of the split."""

    def __init__(self, *, level: int = 2, split: Split = "train", max_turns: int | None = None) -> None:
        super().__init__(max_turns=max_turns)
        self._problems = problems(level, split)

    def start(self, options: Mapping[str, Any]) -> str:
        index = options.get("index")
        if index is None:
            index = self.np_random.integers(len(self._problems))
        self.question, self.answer = self._problems[index]
        return self.question

    def turn(self, action: str) -> Turn:
        return Turn(float(boxed_integer(action) == self.answer))


@functools.cache
def problems(level: int = 2, split: Split = "train") -> tuple[tuple[str, int], ...]:
    """Every problem of a level and a split: (text, answer), in a fixed order."""
    if level not in _LEVELS:
        raise ConfigError(f"no level {level!r} of math: choose one of {', '.join(map(str, _LEVELS))}")
    if split not in ("train", "eval", "all"):
        raise ConfigError(f"no split {split!r} of math: choose train, eval or all")
    form, operands = _LEVELS[level]
    rows = (_problem(form, values) for values in itertools.product(*operands))
    return tuple(row for row in rows if split in ("all", split_of(row[0])))


def split_of(text: str) -> Literal["train", "eval"]:
    """The split that owns a problem's text, the same on every machine and in every version."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def boxed_integer(text: str) -> int | None:
    r"""The integer in the last `\boxed{}` of an answer; None when that holds anything else.

    An answer that boxes more than three different things is a list of guesses, and None as well.
    """
    last = _BOXED_INTEGER.match(text, max(text.rfind("\\boxed"), 0))
    guesses = {box.strip() for box in _BOX.findall(text)}
    return int(last[1]) if last and len(guesses) <= _MOST_ANSWERS else None


def _problem(form: str, values: tuple[int, ...]) -> tuple[str, int]:
    first, *rest = values
    answer = first
    for sign, value in zip(form.replace("{}", ""), rest, strict=True):
        answer = {"+": answer + value, "-": answer - value, "*": answer * value}[sign]
    return f"What is {form.format(*values)}? Put the answer in \\boxed{{}}.", answer
