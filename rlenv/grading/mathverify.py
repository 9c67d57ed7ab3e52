r"""Two answers with notation beyond our grammar (sums, integrals, limits) go in, math-verify's verdict comes out.

Only math-verify's LaTeX reader is used. Its reader of plain expressions hands text to Python's `eval` by way of
SymPy, so that nothing here may lead there: `load` closes that door for the whole process. Nor may its timeouts be
used, which need the main thread; the worker's clock stands in for them.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_LITERAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?")
_loaded = False
_refused: list[str] = []  # what was refused in this comparison, for math-verify swallows errors
_WARM_UP = (
    (r"\int_0^1 x^2 \, dx", r"\frac{1}{3}"),
    (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"),
    (r"\sum_{k=1}^\infty 2^{-k}", "1"),
)


class NotLoaded(RuntimeError):
    """`load` must run first: it takes seconds, which no answer should be charged for."""


def load() -> None:
    """Import math-verify and bar text from SymPy's `eval` from here on."""
    global _loaded
    import math_verify.grader
    import math_verify.parser
    import sympy.physics.units  # noqa: F401  (else loaded late, and its import reads texts of its own)
    from latex2sympy2_extended import latex2sympy2
    from sympy.parsing import sympy_parser

    replaced = [
        (sympy_parser, "eval_expr", _read_literal),
        (sympy_parser, "parse_expr", _read_literal),
        (math_verify.parser, "parse_expr", _read_literal),
        (latex2sympy2, "parse_expr", _read_literal),
        (latex2sympy2, "convert_number", _number),
        (latex2sympy2._Latex2Sympy, "parse_number", lambda _, text: _number(text)),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    _loaded = True
    for candidate, reference in _WARM_UP:
        same(candidate, reference)


def reads(text: str) -> bool:
    """Whether math-verify can read the text."""
    return bool(_read(text))


def same(candidate: str, reference: str) -> bool:
    """Whether math-verify finds both to be the same. Raises PermissionError if anything led to `eval`."""
    _refused.clear()
    answers = _read(reference), _read(candidate)
    from math_verify import verify

    found = verify(*answers, timeout_seconds=None, allow_set_relation_comp=True)
    if _refused:
        raise PermissionError(f"refused to evaluate {_refused.pop()}")
    return bool(found)


def _read(text: str) -> list[Any]:
    if not _loaded:
        raise NotLoaded
    from math_verify import LatexExtractionConfig, parse

    formula = "$" + text.replace("$", " ") + "$"
    return list(parse(formula, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))


def _number(text: str) -> Any:
    """What the lexer found to be a number; its own reader would hand it to `eval`."""
    from sympy import Rational

    value = Fraction(text.replace(",", "").replace(" ", ""))
    return Rational(value.numerator, value.denominator)


def _read_literal(text: object, *_: object, **__: object) -> Any:
    """In place of SymPy's `eval`: its own modules hand it constants such as 3/2; all else is refused."""
    if isinstance(text, str) and _LITERAL.fullmatch(text):
        return _number(text)
    _refused.append(repr(text)[:40])
    raise PermissionError("text is never evaluated")
