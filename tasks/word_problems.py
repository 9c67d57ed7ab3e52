"""A shipped file of short word problems goes in, one problem an episode with an exact integer answer comes out.

The file has one row a problem: {"question": "...", "answer": 34}. Every fifth row belongs to the `eval` split.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlenv.env import TextEnv, Turn
from rlenv.errors import ConfigError
from rlenv.tasks.math import Split, boxed_integer

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
        return Turn(float(boxed_integer(action) == self.answer))


@functools.cache
def rows(split: Split = "train") -> tuple[tuple[str, int], ...]:
    """The rows of a split, (question, answer), in the file's order."""
    if split not in ("train", "eval", "all"):
        raise ConfigError(f"no split {split!r} of word problems: choose train, eval or all")
    from datasets import load_dataset  # takes a second to import

    table = load_dataset("json", data_files=str(ROWS), split="train", streaming=True)  # no cache, no progress bar
    return tuple(
        (row["question"], row["answer"])
        for number, row in enumerate(table)
        if split in ("all", "eval" if number % _EVAL_EVERY == 0 else "train")
    )
