r"""An expression tree and values for its symbols go in, a number comes out; nothing large is ever computed.

Rational arithmetic is exact up to `MAX_BITS`; the rest is mpmath at 60 digits, which costs the same for every size
of number. Every power, factorial, exponential and every argument of a periodic function is measured before it is
computed: one that would pass its bound raises `TooLarge` at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext

from rlenv.grading.nodes import App, Const, Node, Num, Sym

MAX_BITS = 1 << 15  # of an exact numerator or denominator
MAX_MAGNITUDE = 1 << 40  # of the binary logarithm of any number
MAX_PERIODIC_BITS = 1 << 12  # of an argument that must be reduced modulo π or 1
MAX_FACTORIAL = 10**10
MAX_EXACT_FACTORIAL = 2_000
MAX_TERMS = 1_000  # of a sum or product
DIGITS = 60

Number = Any  # Fraction | mpf | mpc: exact where it can be
Point = Mapping[str, Fraction]

_mp = MPContext()  # a context of our own: nobody else's precision changes, nor ours
_mp.dps = DIGITS
_NOISE = _mp.mpf(10) ** -(DIGITS // 2)


class TooLarge(ArithmeticError):
    """The value is too large to compute."""


class Undefined(ArithmeticError):
    """The expression has no value: 1/0, log 0."""


class Between(Undefined):
    """The expression is defined at integers only."""


class NotScalar(TypeError):
    """A set, an interval or a matrix stands where a number should."""


def evaluate(node: Node, point: Point) -> Number:
    """The value of a scalar expression, exact where it is rational. Raises TooLarge, Undefined or NotScalar."""
    match node:
        case Num(value):
            return value
        case Sym(name) if name in point:
            return point[name]
        case Sym("i"):
            return _mp.mpc(0, 1)
        case Sym("e"):
            return +_mp.e
        case Const("pi"):
            return +_mp.pi
        case Const("inf"):
            return _mp.inf
        case App("sum" | "prod" as op, (Sym(index), low, high, body)):
            values = _range(evaluate(low, point), evaluate(high, point))
            terms = [evaluate(body, {**point, index: value}) for value in values]
            return _checked(_add(*terms) if op == "sum" else _multiply(*terms))
        case App(op, args) if op in _OPERATIONS:
            values = [evaluate(arg, point) for arg in args]
            try:
                return _checked(_OPERATIONS[op](*values))
            except (ZeroDivisionError, ValueError) as error:
                raise Undefined("no value at a pole") from error
    raise NotScalar("not a number")


@contextmanager
def doubled_precision() -> Iterator[None]:
    """Within, `evaluate` computes with 120 digits."""
    with _mp.workdps(2 * DIGITS):
        yield


def floating(value: Number) -> Number:
    """The value as an mpmath number."""
    return _mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def is_real(value: Number) -> bool:
    return isinstance(value, Fraction | _mp.mpf) or bool(abs(value.imag) <= abs(value) * _NOISE)


def is_infinite(value: Number) -> bool:
    return not isinstance(value, Fraction) and bool(_mp.isinf(value))


def real(value: Number) -> Number:
    return floating(value).real


def _range(low: Number, high: Number) -> list[Fraction]:
    if not all(isinstance(end, Fraction) and end.denominator == 1 for end in (low, high)):
        raise Between("a range does not end at integers")
    if high - low > MAX_TERMS:
        raise TooLarge(f"more than {MAX_TERMS} terms")
    return [Fraction(value) for value in range(int(low), int(high) + 1)]


def _checked(value: Number) -> Number:
    if isinstance(value, Fraction):
        return value if _bits(value) <= MAX_BITS else floating(value)
    if isinstance(value, _mp.mpc) and value.imag == 0:
        value = value.real
    if _mp.isnan(value):
        raise Undefined("no value")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _magnitude(value: Number) -> int:
    """About log2 |value|, rounded up; 0 for zero and infinity."""
    if isinstance(value, Fraction):
        return value.numerator.bit_length() - value.denominator.bit_length() + 1
    return 0 if value == 0 or _mp.isinf(value) else int(_mp.mag(value))


def _add(*terms: Number) -> Number:
    if all(isinstance(term, Fraction) for term in terms):
        return sum(terms, Fraction(0))
    return _mp.fsum(floating(term) for term in terms)


def _multiply(*factors: Number) -> Number:
    if all(isinstance(factor, Fraction) for factor in factors):
        return math.prod(factors, start=Fraction(1))
    return _mp.fprod(floating(factor) for factor in factors)


def _divide(top: Number, bottom: Number) -> Number:
    if bottom == 0:
        raise Undefined("division by zero")
    if isinstance(top, Fraction) and isinstance(bottom, Fraction):
        return top / bottom
    return floating(top) / floating(bottom)


def _power(base: Number, exponent: Number) -> Number:
    if is_infinite(base) or is_infinite(exponent):
        raise Undefined("a power of infinity")
    if base == 0:
        if not is_real(exponent) or real(exponent) < 0:
            raise Undefined("zero to a negative power")
        return Fraction(int(exponent == 0))
    if base == 1:
        return Fraction(1)
    if abs(floating(exponent)) * max(1, abs(_magnitude(base))) > MAX_MAGNITUDE:
        raise TooLarge("a power is too large to compute")
    if not isinstance(exponent, Fraction):
        return _mp.power(floating(base), exponent)
    if exponent.denominator == 1:
        exact = isinstance(base, Fraction) and _bits(base) * abs(exponent) <= MAX_BITS
        return (base if exact else floating(base)) ** exponent.numerator
    if exponent.denominator % 2 == 1 and is_real(base) and real(base) < 0:
        root = -((-real(base)) ** (_mp.mpf(1) / exponent.denominator))  # the real root, as school has it
        return root**exponent.numerator
    return _mp.power(floating(base), floating(exponent))


def _root(base: Number, degree: Number) -> Number:
    if degree == 2 and isinstance(base, Fraction) and base >= 0:
        top, bottom = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if top * top == base.numerator and bottom * bottom == base.denominator:
            return Fraction(top, bottom)
    return _power(base, _divide(Fraction(1), degree))


def _factorial(value: Number) -> Number:
    if not is_real(value) or is_infinite(value):
        raise Undefined("a factorial of no real number")
    if abs(real(value)) > MAX_FACTORIAL:
        raise TooLarge("a factorial is too large to compute")
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise Undefined("a factorial of a negative number")
        if value <= MAX_EXACT_FACTORIAL:
            return Fraction(math.factorial(int(value)))
    return _mp.gamma(floating(value) + 1)


def _binomial(top: Number, bottom: Number) -> Number:
    if isinstance(top, Fraction) and isinstance(bottom, Fraction) and top.denominator == bottom.denominator == 1:
        n, k = int(top), int(bottom)
        if n >= 0 and not 0 <= k <= n:
            return Fraction(0)
        if n >= 0 and min(k, n - k) * n.bit_length() <= MAX_BITS:
            return Fraction(math.comb(n, k))
    return _divide(_factorial(top), _multiply(_factorial(bottom), _factorial(_add(top, -bottom))))


def _logarithm(value: Number, base: Number = Fraction(10)) -> Number:
    if value == 0 or base in (0, 1):
        raise Undefined("a logarithm of zero")
    return _mp.log(floating(value)) / _mp.log(floating(base))


def _natural_logarithm(value: Number) -> Number:
    if value == 0:
        raise Undefined("a logarithm of zero")
    return _mp.log(floating(value))


def _bounded(function: Callable[[Number], Number], bits: int) -> Callable[[Number], Number]:
    """`function`, refusing an argument of more than `bits` binary digits before its point."""

    def guarded(value: Number) -> Number:
        if _magnitude(value) > bits:
            raise TooLarge("an argument is too large to compute with")
        return function(floating(value))

    return guarded


def _rounded(function: Callable[[Number], Number]) -> Callable[[Number], Number]:
    return _bounded(lambda value: Fraction(int(function(value))), MAX_PERIODIC_BITS)


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": _add,
    "mul": _multiply,
    "div": _divide,
    "neg": lambda value: -value,
    "pow": _power,
    "root": _root,
    "!": _factorial,
    "binom": _binomial,
    "ln": _natural_logarithm,
    "log": _logarithm,
    "abs": abs,
    "%": lambda value: _divide(value, Fraction(100)),
    "deg": lambda value: floating(value) * _mp.pi / 180,
    "floor": _rounded(_mp.floor),
    "ceil": _rounded(_mp.ceil),
    **{name: _bounded(getattr(_mp, name), MAX_MAGNITUDE.bit_length()) for name in ("exp", "sinh", "cosh", "tanh")},
    **{name: _bounded(getattr(_mp, name), MAX_PERIODIC_BITS) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"{prefix}{name}": _bounded(getattr(_mp, f"a{name}"), MAX_PERIODIC_BITS)
       for name in ("sin", "cos", "tan") for prefix in ("a", "arc")},
}  # fmt: skip
