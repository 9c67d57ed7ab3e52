r"""Answer checking that cannot be fooled: a response and a reference go in, a `Verdict` comes out.

    verdict = grade_math(r"… so \boxed{\frac{1}{2}}", "0.5")        # Verdict(correct=True, reason="the same value")

Which answer counts
- The last `\boxed{…}`; boxes side by side are one list. An empty or unclosed last box is no answer.
- Without a box, what follows the last `####`, `final answer` or `answer is`; else a last line that states a value.
- A list, `A or B`, is one answer: it equals neither A nor B. What precedes `</think>` does not count.

What it may equal
- Numbers: their exact value, in any notation (1/2, 0.5, 5e-1, 1,250, 007, 2\frac12). A decimal of six places or more
  may stand for a number that has more, if all its places are right; a shorter one is only its own value.
- Expressions: the same function of the same symbols. Equations: the same up to a constant factor, or solved for a
  symbol. A name (`x =`, `f(x) =`, `x \in`) is dropped, unless both sides have one and they differ.
- Lists and sets: in any order. Points and tuples: in order; never a set. `\pm a` is two answers.
- Intervals: with their ends; also as inequality, union or {x | …}.
- Units: a unit, currency or degree sign that one side leaves out is taken for granted; two that disagree differ, unless
  they convert. p % equals p percent, p/100, and p where the other side says no %.
- Choices: the letter, alone or before its option. Words: the same words, whatever their case.
- Everything else differs: what cannot be read, 1/0, and what is too large to compute (unless it is the same notation).

Abstaining (`correct=None`) is no wrong answer: the reference is unusable (`check_reference` tells when data is
loaded), or judging ran past its time or memory. An empty reference equals nothing: that is False.

Our grammar reads and compares nearly everything, since math-verify's own comparison takes 3^{-80} for 3^{-79}, and
runs for minutes on 10^{10^{10}}; math-verify reads the rest (integrals, limits, endless sums). No text is evaluated.
"""

from __future__ import annotations

from rlenv.grading.grade import check_reference, grade_math, grade_math_async
from rlenv.grading.verdict import Verdict

__all__ = ["Verdict", "check_reference", "grade_math", "grade_math_async"]
