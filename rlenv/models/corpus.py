"""The warm start's texts: a two-digit sum comes in, an answer that guesses or works it out goes out.

A guess is right one time in five, and all five are equally likely, so that sharpening gains nothing. Working
is always right, and longer. A policy that has learned both has something to find out: that working pays.
"""

from __future__ import annotations

import importlib
import random
import re
from typing import NamedTuple

WORK_SHARE = 0.25
GUESS_ERRORS = (-2, -1, 0, 1, 2)

_LEVEL = 2
_TASK = "rlenv.tasks.math"  # reached by name: this library never imports its tasks


class Sum(NamedTuple):
    """A problem as the environment words it, and its operands."""

    text: str
    a: int
    b: int


def train_problems() -> list[Sum]:
    """Every two-digit sum of the task's `train` split, in a fixed order."""
    rows = importlib.import_module(_TASK).problems(_LEVEL, "train")
    return [parse(text) for text, _ in rows]


def parse(text: str) -> Sum:
    """A problem's text with its two operands."""
    a, b = re.findall("[0-9]+", text)
    return Sum(text, int(a), int(b))


def answer(a: int, b: int, rng: random.Random) -> str:
    """What the warm start says to `a+b`: working with probability `WORK_SHARE`, else a guess."""
    return work(a, b) if rng.random() < WORK_SHARE else guess(a, b, rng)


def work(a: int, b: int) -> str:
    """The sum digit by digit, with the carry.

    >>> work(47, 38)
    '7+8=15,4+3+1=8 \\\\boxed{85}'
    >>> work(42, 31)
    '2+1=3,4+3=7 \\\\boxed{73}'
    """
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carried, tens = ("+1", tens + 1) if ones > 9 else ("", tens)
    return f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}{carried}={tens} \\boxed{{{a + b}}}"


def guess(a: int, b: int, rng: random.Random) -> str:
    """The answer at once, off by one of `GUESS_ERRORS`."""
    return f"\\boxed{{{a + b + rng.choice(GUESS_ERRORS)}}}"
