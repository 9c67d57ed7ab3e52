"""Strings of every kind go in; whether a space holds, draws, batches and shares them comes out."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space, create_shared_memory, write_to_shared_memory

import rlenv
from rlenv.spaces import Text, TextOrSample

TEXTS = ["", " ", "a b\nc", "π≈3.14 ✅", r"\frac{1}{2} \boxed{}", "x" * 100_000, "\x00\ud800"]


class Echo(rlenv.TextEnv):
    """Says again what it was told, and never ends."""

    def start(self, options: object) -> str:
        return f"start {self.np_random.integers(1000)} ✅"

    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn(observation=action, terminated=False)


@pytest.mark.parametrize("text", TEXTS)
def test_every_string_is_text(text: str) -> None:
    assert text in Text()
    assert text in TextOrSample()


@pytest.mark.parametrize("other", [None, 3, b"x", ["x"], np.str_])
def test_nothing_else_is_text(other: object) -> None:
    assert other not in Text()
    assert other not in TextOrSample()


def test_only_the_bound_space_holds_samples() -> None:
    assert rlenv.Sample() in TextOrSample()
    assert rlenv.Sample() not in Text()


def test_equal_seeds_draw_equal_strings_and_the_draws_vary() -> None:
    first, second = Text(seed=7), Text(seed=7)
    drawn = [first.sample() for _ in range(200)]
    assert drawn == [second.sample() for _ in range(200)]
    assert {"\n", "π", "🙂"} <= set("".join(drawn)) and "" in drawn
    assert all(text in first for text in drawn)


def test_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="neither mask nor probability"):
        Text().sample(mask=0)


def test_spaces_of_one_kind_are_equal_and_survive_copies_and_pickling() -> None:
    assert Text() == Text(seed=1) != TextOrSample()
    assert copy.deepcopy(Text()) == pickle.loads(pickle.dumps(Text())) == Text()


def test_a_batch_of_text_is_a_tuple() -> None:
    batch = batch_space(Text(seed=0), 3)
    assert ("a", "", "π") in batch
    assert ("a", "b") not in batch
    assert len(set(batch.sample())) == 3


@pytest.mark.parametrize(("shared_memory", "copies"), [(True, True), (True, False), (False, True)])
def test_gymnasiums_own_vectors_return_the_texts_in_order(shared_memory: bool, copies: bool) -> None:
    sync = SyncVectorEnv([Echo] * 3)
    apart = AsyncVectorEnv([Echo] * 3, shared_memory=shared_memory, copy=copies, context="forkserver")
    try:
        assert tuple(apart.reset(seed=5)[0]) == sync.reset(seed=5)[0]
        for actions in (("a", "bb", ""), ("π✅", "x" * 30_000, "\n")):
            assert tuple(apart.step(actions)[0]) == sync.step(actions)[0] == actions
    finally:
        apart.close()


def test_a_copied_batch_does_not_change_with_the_next_step() -> None:
    envs = AsyncVectorEnv([Echo] * 2, context="forkserver")
    try:
        observations, _ = envs.reset(seed=0)
        kept = tuple(observations)
        envs.step(("a", "b"))
        assert observations == kept
        assert isinstance(observations, tuple)
    finally:
        envs.close()


def test_a_text_that_exceeds_shared_memory_is_refused_with_the_way_out() -> None:
    memory = create_shared_memory(Text(), n=1, ctx=multiprocessing)
    with pytest.raises(ValueError, match="shared_memory=False"):
        write_to_shared_memory(Text(), 0, "x" * 2_000_000, memory)
