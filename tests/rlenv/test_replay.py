"""Recorded episodes go in; whether the task still answers as it did, and what is different, comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episodes import Abstaining, Echo, Raising, Sampler, play_group
from gymnasium.envs.registration import EnvSpec

import rlenv
from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.replay import replay
from rlenv.trajectories import read_trajectories, write_trajectories
from rlenv.types import Group

Scripted = Callable[..., ScriptedEngine]


class Reader(rlenv.TextEnv):
    """Asks what `key` is worth, which is up to whoever marks it."""

    def __init__(self, key: str = "a", points: float = 1.0, last_words: str = "") -> None:
        super().__init__()
        self.key, self.points, self.last_words = key, points, last_words

    def start(self, options: Mapping[str, Any]) -> str:
        return f"{self.key}{options.get('more', '')}{self.np_random.integers(100)}"

    def turn(self, action: str) -> rlenv.Turn:
        if self.turns == 1:
            return rlenv.Turn({"effort": 0.5}, f"you said {action}", terminated=False)
        return rlenv.Turn({"effort": 0.5, "answer": self.points}, self.last_words)


def group_of(scripted: Scripted, make: Callable[[], Any], path: Path, **options: Any) -> Group:
    """A group as it comes back from its file."""
    engine = scripted(lambda prompt, sample: "\\boxed{7} so", max_model_len=options.pop("max_model_len", 4096))
    group = play_group(lambda: EngineBoundEnv(make(), engine), Sampler(), seed=8, group_size=2, **options)
    write_trajectories(path / "group.parquet", [group])
    (read,) = read_trajectories(path / "group.parquet")
    return read


@pytest.mark.parametrize("task", ["math-v0", "math-retry-v0", pytest.param("word-problems-v0", marks=pytest.mark.slow)])
def test_a_task_answers_a_recorded_episode_as_it_did(scripted: Scripted, tmp_path: Path, task: str) -> None:
    group = group_of(scripted, lambda: rlenv.make(task, split="eval"), tmp_path, options={"index": 2})
    for row in group.trajectories:
        assert replay(row) == []


@pytest.mark.parametrize("last_words", ["", "well done"])
def test_last_words_and_options_are_part_of_the_comparison(scripted: Scripted, tmp_path: Path, last_words: str) -> None:
    group = group_of(scripted, lambda: Reader(last_words=last_words), tmp_path, options={"more": "?"})
    row = group.trajectories[0]
    assert replay(row, Reader(last_words=last_words)) == []
    assert replay(row, Reader(last_words="!")) == [f"observation 2 was {last_words!r}, and is '!'"]


def test_each_kind_of_difference_is_named(scripted: Scripted, tmp_path: Path) -> None:
    row = group_of(scripted, Reader, tmp_path).trajectories[0]
    assert replay(row, Reader()) == []
    assert replay(row, Reader(points=0.25)) == [
        "the rewards, turn by turn, were [0.5, 1.5], and are [0.5, 0.75]",
        "the named rewards were {'effort': 1.0, 'answer': 1.0}, and are {'effort': 1.0, 'answer': 0.25}",
    ]
    (asked,) = replay(row, Reader(key="b"))
    assert asked.startswith("observation 0 was 'a") and "and is 'b" in asked
    assert replay(replace(row, terminated=False, truncated=True), Reader()) == [
        "(terminated, truncated) was (False, True), and is (True, False)"
    ]
    assert len(replay(replace(row, seed=9), Reader())) == 1


def test_an_edited_answer_shows(scripted: Scripted, tmp_path: Path) -> None:
    row = group_of(scripted, lambda: rlenv.make("math-v0"), tmp_path).trajectories[0]
    env = rlenv.make("math-v0")
    env.reset(seed=8)
    right = {"role": "assistant", "content": f"\\boxed{{{env.unwrapped.answer}}}"}
    edited = replace(row, messages=(row.messages[0], right))
    assert replay(edited) == ["the rewards, turn by turn, were [0.0], and are [1.0]"]


def test_an_episode_that_the_engines_context_cut_agrees(scripted: Scripted, tmp_path: Path) -> None:
    long = "w" * 150
    group = group_of(scripted, lambda: Echo(long, long, long), tmp_path, max_model_len=250)
    row = group.trajectories[0]
    assert row.truncated and row.info["truncated_by"] == "context"
    assert replay(row, Echo(long, long, long)) == []


def test_a_failure_recurs_or_is_told_to_be_gone(scripted: Scripted, tmp_path: Path) -> None:
    failure = group_of(scripted, lambda: Raising(ValueError("x")), tmp_path).failures[0]
    assert replay(failure, Raising(ValueError("x"))) == []
    assert replay(failure, Raising(None)) == ["it ended by ValueError, and ends by a reward"]
    assert replay(failure, Raising(KeyError("x"))) == ["it ended by ValueError, and ends by KeyError"]
    abstained = group_of(scripted, lambda: Abstaining("x"), tmp_path).failures[0]
    assert replay(abstained, Abstaining("x")) == []
    assert replay(abstained, Echo("x")) == ["it ended by abstained, and ends by a reward"]


def test_what_the_engine_lacked_is_no_difference_of_the_task(scripted: Scripted, tmp_path: Path) -> None:
    failure = group_of(scripted, lambda: Echo("x"), tmp_path, max_model_len=12).failures[0]
    assert failure.cause == "prompt_too_long"
    assert replay(failure, Echo("x")) == []


def test_an_episode_whose_task_cannot_be_made_again_says_so(scripted: Scripted, tmp_path: Path) -> None:
    row = group_of(scripted, Reader, tmp_path).trajectories[0]
    with pytest.raises(rlenv.ConfigError, match="make it yourself"):
        replay(row)
    gone = replace(row, info={**row.info, "spec": EnvSpec("mine/gone-v0", "no_such_module:Task")})
    with pytest.raises(rlenv.ConfigError, match=r"no_such_module.*where its module is found"):
        replay(gone)
    odd = group_of(scripted, Reader, tmp_path, options={"more": "?", "data": object()}).trajectories[0]
    with pytest.raises(rlenv.ConfigError, match="options"):
        replay(odd, Reader())
