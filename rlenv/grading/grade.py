"""A response and a reference answer go in, a `Verdict` comes out: from any thread, event loop or process."""

from __future__ import annotations

import asyncio
import re

from rlenv.errors import ConfigError
from rlenv.grading.extract import final_answer, plain_reference
from rlenv.grading.pool import Gone, shared_pool
from rlenv.grading.verdict import Verdict

_INTEGER = re.compile(r"-?[0-9]{1,300}")
_SHOWN = 40  # characters of an answer that a reason quotes


def grade_math(response: str, answer: str, *, timeout_s: float = 5.0) -> Verdict:
    """Whether the final answer of `response` equals the reference `answer`; the rules stand in `rlenv.grading`.

    Blocks until a worker process has judged. `timeout_s` counts seconds from the moment a worker begins. Raises
    ConfigError for a time of 0 or less, and where no worker process can start.

    >>> grade_math(r"So it is \\boxed{\\frac{1}{2}}.", "0.5").correct
    True
    """
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s is {timeout_s}: give seconds above 0, such as 5.0")
    found = final_answer(response)
    if found.text is None:
        return Verdict(False, found.reason)
    reference = plain_reference(answer)
    if _INTEGER.fullmatch(found.text) and _INTEGER.fullmatch(reference):  # most answers: a worker would say the same
        same = int(found.text) == int(reference)
        return _explained(same, f"{'the same' if same else 'another'} value", found.text, reference)
    try:
        reply = shared_pool().ask({"candidate": found.text, "reference": reference}, timeout_s)
    except Gone as error:
        return Verdict(None, f"the grading worker did not answer: {error}")
    return _explained(reply["correct"], reply["reason"], found.text, reference)


async def grade_math_async(response: str, answer: str, *, timeout_s: float = 5.0) -> Verdict:
    """`grade_math`, awaited: the event loop runs on meanwhile."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(shared_pool().executor, lambda: grade_math(response, answer, timeout_s=timeout_s))


def check_reference(answer: str, *, timeout_s: float = 5.0) -> None:
    """Raise ConfigError if nothing can be graded against this reference. Call it when data is loaded."""
    reference = plain_reference(answer)
    if _INTEGER.fullmatch(reference):
        return
    try:
        problem = shared_pool().ask({"reference": reference}, timeout_s).get("problem")
    except Gone as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"the reference {answer[:_SHOWN]!r} cannot be graded against: {problem}; correct or drop it")


def _explained(correct: bool | None, reason: str, candidate: str, reference: str) -> Verdict:
    if correct is not False:
        return Verdict(correct, reason)
    return Verdict(correct, f"{reason}: {candidate[:_SHOWN]!r} for {reference[:_SHOWN]!r}")
