"""The warm start's texts: a two-digit sum comes in, an answer that guesses or works it out goes out.

A guess is right one time in four; working is right always, and longer. A policy that has learned both
has something to find out: that working pays.
"""

from __future__ import annotations

import hashlib
import random

PROMPT = "What is {a}+{b}? Put the answer in \\boxed{{}}."
WORK_SHARE = 0.3
LUCK = 0.25
NEAR_MISSES = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)


def train_problems() -> list[tuple[int, int]]:
    """Every pair of two-digit numbers that evaluation does not use."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [pair for pair in pairs if not _held_out(PROMPT.format(a=pair[0], b=pair[1]))]


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
    ones = a % 10 + b % 10
    carry = "+1" if ones > 9 else ""
    tens = a // 10 + b // 10 + len(carry) // 2
    return f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}{carry}={tens} \\boxed{{{a + b}}}"


def guess(a: int, b: int, rng: random.Random) -> str:
    """The answer at once: right with probability `LUCK`, else a near miss."""
    miss = 0 if rng.random() < LUCK else rng.choice(NEAR_MISSES)
    return f"\\boxed{{{a + b + miss}}}"


def _held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10 == 0
