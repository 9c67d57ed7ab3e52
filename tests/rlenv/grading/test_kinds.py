"""What an answer may equal and what it may not, kind by kind; each pair is asked in both directions."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlenv.grading import grade_math

FOLDER = Path(__file__).parent

WRONG = r"""
9^{9^{9^{9}}} | e^{10^{20}} | \sin(10^{10^{10}}) | 1e999999999 | \frac{1}{0} | \log(0) | 0^{-1} | exit(0) | eval('4')
os.system('ls') | lambda: 4 | 4 if True else 5 | \input{/etc/passwd} | 4 \input{x} | 4;import os | print(4) | 4 4
\max(exit(4)) | (4 | 4) | 4 + | + | .. | \foo{4}
"""  # none of these is an answer, whatever the reference

CHOICES = [
    ("C", "C", True),
    (r"\text{(C)}", "C", True),
    ("(C)", r"\text{C}", True),
    (r"\textbf{(C)}", "C", True),
    (r"\text{(C)} 12", "C", True),
    ("C. 12 cm", "C", True),
    ("C: the third", "(C)", True),
    ("c", "C", True),
    (r"\text{Option C}", "C", True),
    ("B", "C", False),
    ("A, B, C", "C", False),
    (r"\text{A or C}", "C", False),
    ("(A), (C)", "C", False),
    ("A and C", "C", False),
    ("C + 1", "C", False),
    ("12", "C", False),
]


def verdict(response: str, reference: str) -> bool | None:
    return grade_math(rf"\boxed{{{response}}}", reference).correct


def pairs(name: str) -> list[object]:
    """The lines `one <> other` of a table, under their `# kind`."""
    rows, kind = [], ""
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kind = line[2:]
        elif line:
            rows.append(pytest.param(*line.split(" <> "), id=f"{kind}-{line}"))
    return rows


@pytest.mark.parametrize(("one", "other"), pairs("same.txt"))
def test_these_are_the_same_answer(one: str, other: str) -> None:
    assert verdict(one, other) is True
    assert verdict(other, one) is True


@pytest.mark.parametrize(("one", "other"), pairs("different.txt"))
def test_these_are_different_answers(one: str, other: str) -> None:
    assert verdict(one, other) is False
    assert verdict(other, one) is not True


@pytest.mark.parametrize("response", re.split(r" \| |\n", WRONG.strip()))
def test_what_has_no_value_or_cannot_be_read_is_wrong(response: str) -> None:
    assert [verdict(response, reference) for reference in ("0", "4", r"\frac{1}{2}", "x", "(0, 4]")] == [False] * 5


@pytest.mark.parametrize(("response", "reference", "expected"), CHOICES)
def test_a_choice_is_its_letter(response: str, reference: str, expected: bool) -> None:
    assert verdict(response, reference) is expected


def test_long_numbers_and_deep_nests_are_read_or_refused() -> None:
    assert verdict("10" + "0" * 5000, "1" + "0" * 5001) is True
    assert verdict("9" * 5000, "9") is False
    assert verdict("2^{" * 150 + "2" + "}" * 150, "2") is False


def test_an_empty_reference_equals_nothing() -> None:
    assert verdict("5", "") is False
    assert verdict("", " ") is False


RATIONALS = st.fractions(max_denominator=60).filter(lambda value: abs(value) < 10**6)


@given(RATIONALS, RATIONALS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_number_equals_itself_in_every_notation_and_no_other(one: Fraction, other: Fraction) -> None:
    p, q = one.numerator, one.denominator
    notations = [
        f"{p}/{q}",
        rf"\frac{{{p}}}{{{q}}}",
        rf"\frac{{{3 * p}}}{{{3 * q}}}",
        rf"{p} \div {q}",
        f"x = {p}/{q}",
        rf"{p} \cdot {q}^{{-1}}",
    ]
    for notation in notations:
        assert verdict(notation, str(one)) is True
        assert verdict(notation, str(other)) is (one == other)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=5), st.lists(st.integers(-9, 9), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_polynomials_are_equal_as_functions(one: list[int], other: list[int]) -> None:
    def expanded(roots: list[int]) -> str:
        coefficients = [1]
        for root in roots:
            coefficients = [a - root * b for a, b in zip([*coefficients, 0], [0, *coefficients], strict=True)]
        return " + ".join(f"({c})x^{{{len(roots) - n}}}" for n, c in enumerate(coefficients))

    factored = "".join(f"(x - ({root}))" for root in one)
    assert verdict(factored, expanded(one)) is True
    assert verdict(factored, expanded(other)) is (sorted(one) == sorted(other))
