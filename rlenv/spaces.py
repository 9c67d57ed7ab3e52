"""Spaces of text: any Unicode string, and for engine-bound environments also a request to sample one.

`gymnasium.spaces.Text` bounds the length and the characters, and by default rejects the empty string,
spaces, newlines and every letter that is not English; what a language model says fits in none of these.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rlenv.types import Sample

_ALPHABET = "abc XYZ 0189 .,?+-=(){}\\\n\t éß²π√≈中あ✅🙂"
_LONGEST_SAMPLE = 32


class Text(gymnasium.Space[str]):
    """Every string. `sample()` draws a short one, line breaks and characters beyond ASCII included."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A string of 0 to 32 characters. Text has no mask: both arguments must stay None."""
        if mask is not None or probability is not None:
            raise ValueError("a Text space takes neither mask nor probability: call sample() without them")
        length = int(self.np_random.integers(_LONGEST_SAMPLE + 1))
        return "".join(_ALPHABET[i] for i in self.np_random.integers(len(_ALPHABET), size=length))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class TextOrSample(Text):
    """Every string, and every `rlenv.Sample`. `sample()` draws a string, so that checkers need no engine."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str | Sample)
