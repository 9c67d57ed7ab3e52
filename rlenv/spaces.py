"""Spaces of text: any Unicode string, and for engine-bound environments also a request to sample one.

`gymnasium.spaces.Text` bounds the length and the characters, and by default rejects the empty string,
spaces, newlines and every letter that is not English; what a language model says fits in none of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

from rlenv.types import Sample

_ALPHABET = "abc XYZ 0189 .,?+-=(){}\\\n\t éß²π√≈中あ✅🙂"
_LONGEST_SAMPLE = 32
_SHARED_BYTES = 1 << 18  # of one environment's observation in AsyncVectorEnv's shared memory, as UTF-8


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


class _SharedTexts(Sequence[str]):
    """The observations in AsyncVectorEnv's shared memory, as they are when read; a deep copy is a tuple of str."""

    def __init__(self, memory: tuple[Any, Any]) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return len(self._memory[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        lengths, texts = self._memory
        start = range(len(self))[index] * _SHARED_BYTES
        return bytes(texts[start : start + lengths[index]]).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(Text)
def _create_shared_texts(space: Text, n: int = 1, ctx: Any = None) -> tuple[Any, Any]:
    return ctx.RawArray(ctypes.c_int64, n), ctx.RawArray(ctypes.c_char, n * _SHARED_BYTES)


@read_from_shared_memory.register(Text)
def _read_shared_texts(space: Text, shared_memory: tuple[Any, Any], n: int = 1) -> _SharedTexts:
    return _SharedTexts(shared_memory)


@write_to_shared_memory.register(Text)
def _write_shared_text(space: Text, index: int, value: str, shared_memory: tuple[Any, Any]) -> None:
    lengths, texts = shared_memory
    encoded = value.encode("utf-8", "surrogatepass")
    if len(encoded) > _SHARED_BYTES:
        raise ValueError(
            f"an observation of {len(encoded)} bytes does not fit the {_SHARED_BYTES} of shared memory: "
            "give AsyncVectorEnv shared_memory=False"
        )
    start = index * _SHARED_BYTES
    texts[start : start + len(encoded)] = encoded
    lengths[index] = len(encoded)
