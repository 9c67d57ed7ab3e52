"""A shipped file of short word problems goes in, one problem an episode comes out, graded by what an answer means.

The file has one row a problem: {"question": "...", "answer": 34}; `34 apples` and `68/2` are right as well. Every
fifth row belongs to the `eval` split.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlenv.env import TextEnv, Turn
from rlenv.errors import ConfigError
from rlenv.grading import check_reference, grade_math
from rlenv.tasks.math import Split

ROWS = Path(__file__).with_name("word_problems.jsonl")
_EVAL_EVERY = 5


class WordProblemsEnv(TextEnv):
    """One word problem, one answer. `reset(options={"index": i})` asks for the i-th row of the split."""

    def __init__(self, *, split: Split = "train", max_turns: int | None = None) -> None:
        super().__init__(max_turns=max_turns)
        self._rows = rows(split)

    def start(self, options: Mapping[str, Any]) -> str:
        index = options.get("index")
        if index is None:
            index = self.np_random.integers(len(self._rows))
        question, self.answer = self._rows[index]
        return f"{question} Put the answer in \\boxed{{}}."

    def turn(self, action: str) -> Turn:
        verdict = grade_math(action, str(self.answer))
        return Turn(float(verdict.correct is True), abstained=verdict.reason if verdict.correct is None else "")


@functools.cache
def rows(split: Split = "train") -> tuple[tuple[str, int], ...]:
    """The rows of a split, (question, answer), in the file's order. Raises ConfigError for an answer of no use."""
    if split not in ("train", "eval", "all"):
        raise ConfigError(f"no split {split!r} of word problems: choose train, eval or all")
    from datasets import load_dataset  # takes a second to import

    table = load_dataset("json", data_files=str(ROWS), split="train", streaming=True)  # no cache, no progress bar
    chosen = tuple(
        (row["question"], row["answer"])
        for number, row in enumerate(table)
        if split in ("all", "eval" if number % _EVAL_EVERY == 0 else "train")
    )
    for _, answer in chosen:
        check_reference(str(answer))
    return chosen
