r"""Answers and settings of the arithmetic tasks go in; rewards, splits and problem texts come out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlenv
from rlenv.grading import Verdict
from rlenv.tasks.math import boxed_integer, problems, split_of
from rlenv.tasks.word_problems import rows


@pytest.mark.parametrize(
    ("answer", "integer"),
    [
        (r"\boxed{85}", 85),
        ("so \\boxed{ 85\n}.", 85),
        (r"\boxed{-7}", -7),
        (r"\boxed{007}", 7),
        (r"\boxed{12}, no: \boxed{85}", 85),
        (r"\boxed{85} and again \boxed{85}, \boxed{85}, \boxed{85}, \boxed{85}", 85),
        (r"\boxed{85}, no: \boxed{12}", 12),
        (r"\boxed{85} \boxed{}", None),
        (r"\boxed{85} \boxed{\frac{1}{2}}", None),
        (r"\boxed{85} \boxed{12", None),
        (r"\boxed{85, 86}", None),
        (r"\boxed{85.0}", None),
        (r"\boxed{8 5}", None),
        (r"\boxed{\text{85}}", None),
        (r"\boxed{1} \boxed{2} \boxed{3} \boxed{85}", None),
        (r"\boxed{٨٥}", None),
        (r"boxed{85}", None),
        (r"\boxed{" + "9" * 5000 + "}", None),
        ("85", None),
        ("", None),
    ],
)
def test_the_last_box_must_hold_exactly_one_integer(answer: str, integer: int | None) -> None:
    assert boxed_integer(answer) == integer


def test_a_megabyte_of_braces_is_read_at_once() -> None:
    assert boxed_integer("\\boxed{" * 150_000 + "}" * 150_000) is None


def test_the_prompt_is_the_sum_and_where_to_put_it() -> None:
    observation, _ = rlenv.make("math-v0").reset(seed=0)
    assert re.fullmatch(r"What is [1-9]\d\+[1-9]\d\? Put the answer in \\boxed\{\}\.", observation)


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_no_text_is_in_both_splits_and_every_answer_is_right(level: int) -> None:
    train, held_out, everything = (problems(level, split) for split in ("train", "eval", "all"))
    assert sorted((*train, *held_out)) == sorted(everything)
    assert len(dict(everything)) == len(everything)
    assert all(split_of(text) == "eval" for text, _ in held_out)
    assert {split_of(text) for text, _ in train} == {"train"}
    for text, answer in everything[:: max(1, len(everything) // 500)]:
        expression = re.findall(r"-|\+|\*|\d+", text.split("?")[0])
        total = int(expression[0])
        for sign, operand in zip(expression[1::2], map(int, expression[2::2]), strict=True):
            total = {"+": total + operand, "-": total - operand, "*": total * operand}[sign]
        assert total == answer


def test_the_default_level_is_large_enough_to_hold_problems_out() -> None:
    assert len(problems()) + len(problems(split="eval")) == 8100
    assert len(problems(split="eval")) == 818  # the same on every machine


def test_environments_draw_from_their_split_and_level() -> None:
    for level, split in ((1, "eval"), (2, "train"), (2, "eval"), (3, "all")):
        env = rlenv.make("math-v0", level=level, split=split)
        known = dict(problems(level, split))
        for seed in range(50):
            observation, _ = env.reset(seed=seed)
            assert known[observation] == env.unwrapped.answer


def test_an_index_asks_for_one_problem() -> None:
    env = rlenv.make("math-v0", split="eval")
    asked = [env.reset(options={"index": index})[0] for index in range(818)]
    assert asked == [text for text, _ in problems(2, "eval")]


@pytest.mark.parametrize("wrong", [{"level": 9}, {"split": "test"}])
def test_an_unknown_level_or_split_names_the_known(wrong: dict[str, object]) -> None:
    with pytest.raises(rlenv.ConfigError, match="choose"):
        rlenv.make("math-v0", **wrong)
    with pytest.raises(rlenv.ConfigError, match="choose"):
        rlenv.make("math-retry-v0", **wrong)


def test_a_second_attempt_earns_half() -> None:
    env = rlenv.make("math-retry-v0")
    env.reset(seed=0)
    observation, reward, terminated, *_ = env.step("\\boxed{-1}")
    assert (observation, reward, terminated) == ("That is not right. Try once more.", 0.0, False)
    _, reward, terminated, truncated, _ = env.step(f"\\boxed{{{env.unwrapped.answer}}}")
    assert (reward, terminated, truncated) == (0.5, True, False)
    env.reset(seed=0)
    env.step("wrong")
    assert env.step("wrong again")[1:4] == (0.0, True, False)


def test_the_word_problems_are_split_by_row() -> None:
    train, held_out = rows("train"), rows("eval")
    assert (len(train), len(held_out)) == (51, 13)
    assert not {question for question, _ in train} & {question for question, _ in held_out}
    assert rows("all")[:6] == (held_out[0], *train[:4], held_out[1])
    assert all(type(answer) is int and question.endswith(("?", ".")) for question, answer in rows("all"))
    with pytest.raises(rlenv.ConfigError, match="choose"):
        rlenv.make("word-problems-v0", split="test")


@pytest.mark.parametrize(
    ("form", "reward"),
    [("\\boxed{{{0}}}", 1.0), ("\\boxed{{{0} apples}}", 1.0), ("\\boxed{{\\frac{{{0}0}}{{10}}}}", 1.0),
     ("\\boxed{{{0}, 1}}", 0.0), ("\\boxed{{{0}5}}", 0.0), ("{0} or not", 0.0)],
)  # fmt: skip
def test_a_word_problem_is_graded_by_what_its_answer_means(form: str, reward: float) -> None:
    env = rlenv.make("word-problems-v0")
    env.reset(seed=1)
    assert env.step(form.format(env.unwrapped.answer))[1] == reward


def test_a_grader_that_cannot_judge_abstains(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "judging takes more memory than the cap allows"
    monkeypatch.setattr("rlenv.tasks.word_problems.grade_math", lambda *given: Verdict(None, reason))
    env = rlenv.make("word-problems-v0")
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step("\\boxed{1}")
    assert (reward, terminated, info["abstained"]) == (0.0, True, reason)


def test_an_answer_that_nothing_can_be_graded_against_is_told_when_the_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answer": "\\\\frac{1}{0}"}\n')
    monkeypatch.setattr("rlenv.tasks.word_problems.ROWS", tmp_path / "rows.jsonl")
    with pytest.raises(rlenv.ConfigError, match="cannot be graded against"):
        rows.__wrapped__("all")
