r"""Two scalar expressions go in, whether they are the same number or the same function comes out.

Numbers are compared exactly where they are rational, else to 60 digits, and once more to 120 where they are close.
With free symbols two expressions are equal if they agree at fixed rational points of both signs, among them integers;
different rational functions agree at such points by chance almost never (Schwartz, J. ACM 27(4), 1980).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from random import Random

from rlenv.grading.evaluate import (
    DIGITS,
    Between,
    Number,
    Point,
    TooLarge,
    Undefined,
    doubled_precision,
    evaluate,
    floating,
    is_infinite,
    is_real,
    real,
)
from rlenv.grading.nodes import App, Matrix, Node, Num, Seq, Sym

ROUNDED_PLACES = 6  # a decimal with at least this many places may stand for a number that has more
ENOUGH_POINTS = 3


def equal(left: Node, right: Node) -> bool:
    """Whether both are the same number, or the same function of their symbols.

    Raises TooLarge, Undefined or NotScalar where the question has no answer.
    """
    names = symbols(left) | symbols(right)
    if left == right:
        return True
    if not names:
        return _same(left, right, {}) or _rounds_to(left, right) or _rounds_to(right, left)
    complex_too = "i" in _letters(left) | _letters(right)
    agreed = 0
    for point in sample_points(names):
        kinds = {_kind(left, point), _kind(right, point)}
        if kinds == {"real"} or (complex_too and kinds <= {"real", "complex"}):
            if not _same(left, right, point):
                return False
            agreed += 1
        elif len(kinds) == 2 and "unknown" not in kinds:
            return False  # their domains differ
    return agreed >= ENOUGH_POINTS


def proportional(left: Node, right: Node) -> int | None:
    """The sign of the constant c with left = c · right everywhere; None where there is no such constant but 0."""
    ratios: list[Number] = []
    zeros = 0
    for point in sample_points(symbols(left) | symbols(right)):
        kinds = {_kind(left, point), _kind(right, point)}
        if kinds != {"real"}:
            continue
        top, bottom = evaluate(left, point), evaluate(right, point)
        if (top == 0) != (bottom == 0):
            return None
        if bottom == 0:
            zeros += 1
        else:
            ratios.append(floating(top) / floating(bottom))
    if len(ratios) + zeros < ENOUGH_POINTS or not ratios or not all(_close(ratio, ratios[0]) for ratio in ratios):
        return None
    return 1 if ratios[0] > 0 else -1


def symbols(node: Node) -> frozenset[str]:
    """The free symbols of an expression; i and e are numbers."""
    return _letters(node) - {"i", "e"}


def sample_points(names: frozenset[str]) -> Iterator[Point]:
    """Four points of positive fractions, three with negative ones, four of positive integers; the same every time.

    Every other fraction is below 1, where inverse functions are real.
    """
    draw = Random(0)
    ordered = sorted(names)
    for trial in range(7):
        low, high = (3, 98) if trial % 2 == 0 else (104, 299)
        signs = [-1 if trial > 3 and (trial + index) % 2 == 0 else 1 for index in range(len(ordered))]
        yield {name: Fraction(sign * draw.randint(low, high), 101) for name, sign in zip(ordered, signs, strict=True)}
    for _ in range(4):
        yield dict(zip(ordered, map(Fraction, draw.sample(range(2, 9 + len(ordered)), len(ordered))), strict=True))


def _letters(node: Node) -> frozenset[str]:
    match node:
        case Sym(name):
            return frozenset({name})
        case App("based", _):
            return frozenset()
        case App("sum" | "prod", (Sym(index), low, high, body)):
            return _letters(low) | _letters(high) | (_letters(body) - {index})
        case App(_, args):
            return frozenset().union(*map(_letters, args))
        case Seq(_, _, items):
            return frozenset().union(*(_letters(part) for item in items for part in item.parts))
        case Matrix(rows):
            return frozenset().union(*(_letters(entry) for row in rows for entry in row))
    return frozenset()


def _kind(node: Node, point: Point) -> str:
    try:
        return "real" if is_real(evaluate(node, point)) else "complex"
    except (TooLarge, Between):
        return "unknown"
    except Undefined:
        return "undefined"


def _same(left: Node, right: Node, point: Point) -> bool:
    """Equal at one point. A small difference is computed anew with more digits: rounding shrinks, a value stays."""
    a, b = evaluate(left, point), evaluate(right, point)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    if is_infinite(a) or is_infinite(b):
        return bool(floating(a) == floating(b))
    a, b = floating(a), floating(b)
    difference, scale, small = abs(a - b), max(abs(a), abs(b)), floating(Fraction(1, 10**20))
    if difference == 0:
        return True
    if difference > scale * small and scale > small:
        return False
    with doubled_precision():
        again = abs(floating(evaluate(left, point)) - floating(evaluate(right, point)))
        return bool(again <= difference / 10 ** (DIGITS // 2))


def _close(a: Number, b: Number) -> bool:
    return bool(abs(a - b) * 10 ** (DIGITS // 2) <= max(abs(a), abs(b)))


def _rounds_to(decimal: Node, exact: Node) -> bool:
    """Whether `decimal` has at least six places, and is `exact` rounded or cut off at the last of them."""
    sign = 1
    if isinstance(decimal, App) and decimal.op == "neg":
        decimal, sign = decimal.args[0], -1
    if not isinstance(decimal, Num) or decimal.places is None or decimal.places < ROUNDED_PLACES:
        return False
    value = evaluate(exact, {})
    if not is_real(value) or is_infinite(value):
        return False
    written = sign * decimal.value
    rest = value - written if isinstance(value, Fraction) else real(value) - floating(written)
    rest *= sign * 10**decimal.places  # in units of the last place, and positive where digits were cut off
    return bool(0 <= rest < 1 or abs(rest) * 2 <= 1)
