"""Every line of the reference answers gets its verdict, from wherever it is asked for."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlenv.errors import ConfigError
from rlenv.grading import Verdict, check_reference, grade_math, grade_math_async

FILE = Path(__file__).parent / "math_answers.jsonl"
LINES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
EXPECTED = {line["id"]: line["expected"] for line in LINES}

SCRIPT = """
import json, sys
from rlenv.grading import grade_math
lines = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
print(json.dumps({line["id"]: grade_math(line["response"], line["gold"]).correct for line in lines}))
"""  # without a __main__ guard, as people write scripts


def verdicts() -> dict[str, bool | None]:
    return {line["id"]: grade_math(line["response"], line["gold"]).correct for line in LINES}


def test_every_line_in_the_main_thread() -> None:
    assert verdicts() == EXPECTED


def test_every_line_in_threads() -> None:
    with ThreadPoolExecutor(8) as threads:
        graded = list(threads.map(lambda line: grade_math(line["response"], line["gold"]).correct, LINES * 3))
    assert graded == [line["expected"] for line in LINES * 3]


def test_every_line_in_asyncio() -> None:
    async def grade() -> list[Verdict]:
        return await asyncio.gather(*(grade_math_async(line["response"], line["gold"]) for line in LINES))

    assert [verdict.correct for verdict in asyncio.run(grade())] == list(EXPECTED.values())


def test_every_line_called_synchronously_inside_an_event_loop() -> None:
    async def grade() -> dict[str, bool | None]:
        return verdicts()

    assert asyncio.run(grade()) == EXPECTED


def test_every_line_in_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, script, FILE], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == EXPECTED
    assert done.stderr == ""


def test_every_line_in_a_spawned_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(verdicts) == EXPECTED


def test_a_verdict_says_why() -> None:
    assert grade_math(r"\boxed{15}", "12") == Verdict(False, "another value: '15' for '12'")
    assert grade_math(r"\boxed{0.5}", r"\frac{1}{2}") == Verdict(True, "the same value")
    assert grade_math("", "7") == Verdict(False, "the response gives no final answer")


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        (r"\frac{1}{", "stands where a value should"),
        (r"\boxed{3", "it is empty"),
        (r"\frac{1}{0}", "division by zero"),
        (r"10^{10^{10^{10}}}", "too large"),
        (r"\mystery{3}", "is no notation"),
        ("9" * 20_000, "longer than"),
    ],
)
def test_an_unusable_reference_is_reported_when_data_is_loaded(reference: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_reference(reference)


USABLE = r"""
7
\frac{1}{2}
\text{Evelyn}
C
(0, 2]
x < 1 \text{ or } x > 3
11,\! 111,\! 100
4210_{5}
864 \mbox{ inches}^2
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}
\{1\pm\sqrt{5},-2\}
3:15 p.m.
\text{no real solutions}
10^{10^{10}}
so 3 + 4 = 7 #### 7
\int_0^1 x \, dx
f^{-1}(x) = \frac{x-1}{2}
\sum_{k=1}^{n} k^2
9^{\text{th}}
0.\overline{142857}
Sunday, March 3
\angle ABC
"""


@pytest.mark.parametrize("reference", USABLE.strip().splitlines())
def test_a_usable_reference_passes_and_equals_itself(reference: str) -> None:
    check_reference(reference)
    assert grade_math(rf"\boxed{{{reference.rpartition('#### ')[2]}}}", reference).correct


def test_an_unusable_reference_makes_the_grader_abstain() -> None:
    assert grade_math(r"\boxed{5}", r"\frac{1}{").correct is None
    assert grade_math(r"\boxed{5}", r"\frac{1}{0}").correct is None


def test_a_time_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="give seconds above 0"):
        grade_math(r"\boxed{5}", "5", timeout_s=0)


def test_three_hundred_short_answers_a_second() -> None:
    short = [line for line in LINES if len(line["response"]) < 80]
    grade_math(r"\boxed{1/2}", "0.5")  # starts a worker
    started = time.perf_counter()
    for line in short * 5:
        grade_math(line["response"], line["gold"])
    assert len(short) * 5 / (time.perf_counter() - started) > 300
