"""What grading says about one response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`correct` is None where the grader abstains: that is no reward of 0. `reason` says why in one clause."""

    correct: bool | None
    reason: str
