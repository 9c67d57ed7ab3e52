"""Which of the things a response says is its final answer."""

from __future__ import annotations

import time

import pytest

from rlenv.grading.extract import final_answer, plain_reference

BOXES = [
    (r"First \boxed{12}. The sign was wrong: \boxed{15}.", "15"),
    (r"So \boxed{315}, as before.\n\n**Final Answer**\n\boxed{315}", "315"),
    (r"\boxed{1} \boxed{2} \boxed{3}", "1, 2, 3"),
    (r"$x=\boxed{3}$ or $x=\boxed{5}$", "3, 5"),
    (r"\boxed{3} \text{ and } \boxed{3}", "3"),
    (r"\boxed{3}. Therefore, after all of this, it must be \boxed{5}", "5"),
    (r"\boxed{\frac{1}{\sqrt{1+\frac{1}{4}}}}", r"\frac{1}{\sqrt{1+\frac{1}{4}}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"{ unbalanced \boxed{5}", "5"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    (r"\fbox{5}", "5"),
    (r"\boxed 5", "5"),
    (r"\boxed {5}", "5"),
    (r"$\boxed{35}$ pct", r"35 \text{pct}"),
    (r"\boxed{35}\%", r"35\%"),
    (r"\boxed{5}\text{ cm}", r"5 \text{cm}"),
    (r"\boxed{5} in total", "5"),
    (r"\boxed{5} is it", "5"),
    (r"<think>\boxed{3}</think> so \boxed{4}", "4"),
    (r"\boxed{2}, final answer: 3", "2"),
    (r"\boxed{42}" + " and nothing changes." * 500, "42"),
]

MARKED = [
    ("2 + 40 = 42\n#### 42\nand the reasoning goes on", "42"),
    ("#### 5\n#### 1,234 dollars", "1,234 dollars"),
    ("So answer is consistent.\n\n✅ Final Answer: **58**", "58"),
    ("Final answer: 1.200e+03", "1.200e+03"),
    ("**Final Answer**\n\n$$\\frac{1}{2}$$", r"$$\frac{1}{2}$$"),
    ("## Answer\n42", "42"),
    ("The answer is 58 since each row adds two.", "58"),
    ("The answer is x = ab, as ab > 0.", "x = ab"),
    ("The answer to the question is 42.", "42"),
    ("The final answer is therefore -7.", "-7"),
    ("The answer should be $2ab$ because it is.", "$2ab$"),
    ("The answer is $x = 3$ and $y = 4$.", "$x = 3$ and $y = 4$"),
    ("The answer is 5 or 6.", "5 or 6"),
    ("The answer is 3 and not 5", "3"),
    ("The answer is 12 square meters per side", "12 square meters per"),
    ("the answer is 11:30 AM", "11:30 AM"),
    ("Answer: (C) because", "(C)"),
    ("The answer is Yes, because it must be.", "Yes"),
    ("The answer is no solution.", "no solution"),
    ("<answer> 7 </answer> and more", "7"),
    ("Answer: 5 <|im_end|>", "5"),
    ("<think>the answer is 3</think>The answer is 4", "4"),
]

LAST_LINES = [
    ("42", "42"),
    ("First compute 6*7.\n42", "42"),
    ("Yes", "Yes"),
    ("x/2", "x/2"),
    ("17+19=36", "17+19=36"),
    ("Thus, the number is **73**.", "73"),
    ("So the diagonal is $6\\sqrt{5}$.", r"6\sqrt{5}"),
    ("Thus we have 5 apples and 6 pears, so the total is 11.", "11"),
    ("Hence x = 5.", "5"),
]

NOTHING = [
    ("", "gives no final answer"),
    ("   \n ", "gives no final answer"),
    ("I do not know, sorry about that.", "gives no final answer"),
    (r"\boxed{}", "the last box is empty"),
    (r"\boxed{7} but then \boxed{ }", "the last box is empty"),
    (r"\boxed{7} but then \boxed{", "not closed"),
    (r"\boxed{7", "not closed"),
    ("Answer:", "nothing follows"),
    ("<think>the answer is 3</think>", "gives no final answer"),
]


@pytest.mark.parametrize(("response", "answer"), BOXES + MARKED + LAST_LINES)
def test_the_final_answer_is_found(response: str, answer: str) -> None:
    assert final_answer(response).text == answer


@pytest.mark.parametrize(("response", "reason"), NOTHING)
def test_no_answer_is_found_where_none_is_given(response: str, reason: str) -> None:
    found = final_answer(response)
    assert found.text is None
    assert reason in found.reason


@pytest.mark.parametrize(
    ("reference", "plain"),
    [(r"\boxed{5}", "5"), ("3 + 4 = <<3+4=7>>7\n#### 7", "7"), (" 7 ", "7"), (r"\frac{1}{2}", r"\frac{1}{2}")],
)
def test_a_reference_loses_what_stands_around_it(reference: str, plain: str) -> None:
    assert plain_reference(reference) == plain


@pytest.mark.parametrize(
    "unit",
    [
        r"\boxed{",
        r"\boxed{1} ",
        "{",
        "answer is ",
        "final answer: ",
        "**",
        "$",
        " ",
        "\n",
        "####",
        "a,",
        "= ",
        r"\text{",
    ],
)
def test_extraction_is_linear_in_the_length_of_the_response(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    started = time.process_time()
    final_answer(text)
    assert time.process_time() - started < 5.0
