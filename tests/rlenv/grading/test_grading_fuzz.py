"""Whatever a model writes, grading answers in time, runs nothing and needs no new worker."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlenv.grading import grade_math
from rlenv.grading.pool import shared_pool
from rlenv.grading.worker import MEMORY_CAP

LINES = (Path(__file__).parent / "math_answers.jsonl").read_text(encoding="utf-8").splitlines()
SEEDS = [json.loads(line)["response"][:400] for line in LINES]
CANARY = Path("/tmp/rlenv-grading-canary")
TIMEOUT_S = 5.0

INJECTIONS = st.sampled_from(
    [
        f"__import__('os').system('touch {CANARY}')",
        f"open('{CANARY}', 'w').close() or 7",
        f"exec(\"open('{CANARY}', 'w')\")",
        rf"\immediate\write18{{touch {CANARY}}}",
        r"\input{/etc/passwd}",
        r"\input|'touch x'",
        "[].__class__.__base__.__subclasses__()",
        "(lambda: 7)()",
        "os.kill(os.getpid(), 9)",
        "exit(0)",
        "${7*7}",
        "{{7*7}}",
        "%n%s%s%n",
        "'; DROP TABLE answers; --",
        "\x00\x1b[2J\r\n",
    ]
)
COMMANDS = st.sampled_from(
    re.findall(
        r"\S+",
        r"""
        \frac \sqrt \binom \text \left( \right) \sum_{k=1}^ \int_0^1 \lim \begin{pmatrix} \end{pmatrix} \\ & \pm \cup
        \{ \} \le < = , ; : | ! % ^ _ \log \sin \pi i e \circ \boxed \infty \overline \ldots and or cm \$
        - + * / ( ) [ ]
        """,
    )
)
NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(1, 6_000).map(lambda size: "9" * size),
    st.floats().map(repr),
    st.integers(2, 60).map(lambda depth: "9^{" * depth + "9" + "}" * depth),
    st.integers(1, 10**12).map(lambda n: f"({n})!"),
    st.integers(1, 10**9).map(lambda n: rf"\binom{{{n}}}{{{n // 2}}}"),
    st.integers(1, 10**18).map(lambda n: f"1e{n}"),
)
CHARACTERS = st.text(st.characters(exclude_categories=()), max_size=40)  # control characters and lone surrogates too
PIECES = st.one_of(COMMANDS, NUMBERS, CHARACTERS, INJECTIONS, st.sampled_from(SEEDS))
NESTED = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        inner.map(lambda text: f"{{{text}}}"),
        inner.map(lambda text: rf"\sqrt{{{text}}}"),
        st.tuples(inner, inner).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
        st.lists(inner, max_size=6).map(" ".join),
    ),
    max_leaves=12,
)
LONG = st.builds(lambda text, times: text * times, NESTED, st.integers(1, 300))
ANSWERS = st.one_of(NESTED, LONG)
RESPONSES = st.one_of(
    ANSWERS.map(lambda text: rf"\boxed{{{text}}}"),
    ANSWERS.map(lambda text: rf"\boxed{{{text}"),
    ANSWERS.map(lambda text: f"The answer is {text}."),
    ANSWERS,
)
REFERENCES = st.one_of(st.sampled_from(["7", r"\frac{1}{2}", "(0, 2]", "x = 7", "C", "", "5 cm"]), NESTED)


def held() -> set[int]:
    return {worker._process.pid for worker in shared_pool()._workers}


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def grade_anything(response: str, reference: str) -> None:
    started = time.perf_counter()
    verdict = grade_math(response, reference, timeout_s=TIMEOUT_S)
    assert time.perf_counter() - started < TIMEOUT_S + 5.0
    assert verdict.correct in (True, False, None)
    assert "failed with" not in verdict.reason, verdict
    assert "ended with" not in verdict.reason, verdict
    assert not CANARY.exists()
    assert all(peak_bytes(pid) < MEMORY_CAP for pid in held())


@pytest.mark.slow
@given(RESPONSES, REFERENCES)
@example(r"\boxed{" * 30_000, "7")
@example("{" * 100_000, "7")
@example("answer is " * 50_000, "7")
@example(" " * 200_000 + "final", "7")
@example(r"\text{" * 1_000 + "7" + "}" * 1_000, "7")
@example(r"\boxed{" + "(" * 5_000 + "}", "7")
@example(r"\boxed{" + "-" * 5_000 + "7}", "7")
@example(r"\boxed{" + "7!" * 400 + "}", "7")
@example(r"\boxed{" + "1," * 700 + "1}", "1")
@example("x^" * 700 + "2", "7")
@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_anything_is_graded(response: str, reference: str) -> None:
    grade_anything(response, reference)


@pytest.mark.slow
@given(RESPONSES, REFERENCES)
@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_ten_thousand_fuzzed_answers_are_graded(response: str, reference: str) -> None:
    grade_anything(response, reference)


@given(INJECTIONS)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
def test_an_injection_is_wrong_and_runs_nothing(text: str) -> None:
    assert grade_math(rf"\boxed{{{text}}}", "7").correct is False
    assert not CANARY.exists()


@given(st.integers(-(10**40), 10**40), st.integers(-(10**40), 10**40), st.integers(0, 5))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_integers_get_the_verdict_of_arithmetic_here_and_in_a_worker(one: int, other: int, zeros: int) -> None:
    sign = "-" if one < 0 else ""
    written = sign + "0" * zeros + str(abs(one))
    for reference in (one, other):
        in_process = grade_math(rf"\boxed{{{written}}}", str(reference)).correct
        in_worker = grade_math(rf"\boxed{{{written} + 0}}", str(reference)).correct
        assert in_process is in_worker is (one == reference)
