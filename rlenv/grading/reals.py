r"""An answer that describes a set of reals goes in, its pieces come out, so that notations of one set compare equal.

>>> real_set(read("x < 1 or x >= 3"))       # the same pieces as (-\infty, 1) \cup [3, \infty)

`certain` tells an interval from what only may be one: `(2, 3)` is a point as well, `(2, 3]` is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from rlenv.grading.evaluate import NotScalar, Number, TooLarge, Undefined, evaluate, floating, is_real, real
from rlenv.grading.nodes import Answer, App, Const, Node, Seq, Statement, Sym
from rlenv.grading.scalars import symbols

_INFINITY = evaluate(Const("inf"), {})


@dataclass(frozen=True, slots=True)
class Piece:
    """All reals between two ends; an end belongs to it if it is closed."""

    low: Number
    low_closed: bool
    high: Number
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """Disjoint pieces in ascending order."""

    pieces: tuple[Piece, ...]
    certain: bool = True


_ALL = RealSet((Piece(-_INFINITY, False, _INFINITY, False),))


def real_set(answer: Answer) -> RealSet | None:
    """The set that the answer describes, None where it describes none or its ends are not numbers."""
    try:
        sets = [_of_statement(statement) for statement in answer.statements]
    except (TooLarge, Undefined, NotScalar):
        return None
    known = [each for each in sets if each is not None]
    if len(known) < len(sets):
        return None
    if len(known) == 1:
        return known[0]
    if not all(each.certain for each in known):
        return None
    return _joined(known, answer.joint)


def same_set(one: RealSet, other: RealSet) -> bool:
    return len(one.pieces) == len(other.pieces) and all(
        a.low_closed == b.low_closed and a.high_closed == b.high_closed and _at(a.low, b.low) and _at(a.high, b.high)
        for a, b in zip(one.pieces, other.pieces, strict=True)
    )


def _joined(sets: list[RealSet], joint: str) -> RealSet:
    """`or` unites; a comma or `and` means both conditions, unless nothing meets both."""
    both = _ALL
    for each in sets:
        both = _intersection(both, each)
    return both if joint != "or" and both.pieces else _union(sets)


def _of_statement(statement: Statement) -> RealSet | None:
    if statement.unit is not None:
        return None
    if not statement.relations:
        return _of_node(statement.parts[0])
    variables = [index for index, part in enumerate(statement.parts) if isinstance(part, Sym) and symbols(part)]
    if len(variables) != 1 or any(symbols(part) for part in statement.parts if not isinstance(part, Sym)):
        return None
    if statement.relations == ("in",):
        inner = _of_node(statement.parts[1])
        return inner and RealSet(inner.pieces)
    result = _ALL
    for index, relation in enumerate(statement.relations):
        if index + 1 == variables[0]:
            half = _half_line(_MIRRORED.get(relation), _end(statement.parts[index]))
        elif index == variables[0]:
            half = _half_line(relation, _end(statement.parts[index + 1]))
        else:
            return None
        if half is None:
            return None
        result = _intersection(result, half)
    return result


_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}


def _half_line(relation: str | None, end: Number) -> RealSet | None:
    match relation:
        case "<" | "<=":
            return RealSet((Piece(-_INFINITY, False, end, relation == "<="),))
        case ">" | ">=":
            return RealSet((Piece(end, relation == ">=", _INFINITY, False),))
        case "!=":
            return _complement(RealSet((Piece(end, True, end, True),)))
    return None


def _of_node(node: Node) -> RealSet | None:
    match node:
        case Const("reals"):
            return _ALL
        case Const("empty"):
            return RealSet(())
        case Seq(_, _, items, such=True):
            return real_set(Answer(items))
        case Seq("{", "}", items):
            return RealSet(_union([_point(_single(item)) for item in items]).pieces, certain=False)
        case Seq(left, right, (low, high)):
            return _interval(left, right, _end(_single(low)), _end(_single(high)))
        case App("cup" | "cap" | "minus" as op, (left_node, right_node)):
            one, other = _of_node(left_node), _of_node(right_node)
            if one is None or other is None:
                return None
            if op == "cup":
                return _union([one, other])
            return _intersection(one, other if op == "cap" else _complement(other))
    return None


def _interval(left: str, right: str, low: Number, high: Number) -> RealSet | None:
    if floating(low) >= floating(high):
        return None
    unbounded = low == -_INFINITY or high == _INFINITY
    return RealSet((Piece(low, left == "[", high, right == "]"),), certain=unbounded or left + right in ("(]", "[)"))


def _point(node: Node) -> RealSet:
    value = _end(node)
    return RealSet((Piece(value, True, value, True),))


def _single(statement: Statement) -> Node:
    if statement.relations or statement.unit is not None:
        raise NotScalar("a relation stands where a number should")
    return statement.parts[0]


def _end(node: Node) -> Number:
    if symbols(node):
        raise NotScalar("an end is no number")
    value = evaluate(node, {})
    if not is_real(value):
        raise NotScalar("an end is not real")
    return value if isinstance(value, Fraction) else real(value)


def _at(a: Number, b: Number) -> bool:
    a, b = floating(a), floating(b)
    return bool(a == b) or bool(abs(a - b) * 10**30 <= max(abs(a), abs(b)) < _INFINITY)


def _union(sets: Iterable[RealSet]) -> RealSet:
    pieces = sorted(
        (piece for each in sets for piece in each.pieces), key=lambda piece: (floating(piece.low), not piece.low_closed)
    )
    merged: list[Piece] = []
    for piece in pieces:
        if merged and _touch(merged[-1], piece):
            merged[-1] = _widened(merged[-1], piece)
        else:
            merged.append(piece)
    return RealSet(tuple(merged))


def _touch(left: Piece, right: Piece) -> bool:
    if _at(left.high, right.low):
        return left.high_closed or right.low_closed
    return bool(floating(left.high) > floating(right.low))


def _widened(left: Piece, right: Piece) -> Piece:
    if _at(left.high, right.high):
        return Piece(left.low, left.low_closed, left.high, left.high_closed or right.high_closed)
    last = left if floating(left.high) > floating(right.high) else right
    return Piece(left.low, left.low_closed, last.high, last.high_closed)


def _complement(of: RealSet) -> RealSet:
    low, low_closed = -_INFINITY, False
    gaps: list[Piece] = []
    for piece in of.pieces:
        if floating(low) < floating(piece.low) or (low_closed and not piece.low_closed and _at(low, piece.low)):
            gaps.append(Piece(low, low_closed, piece.low, not piece.low_closed and piece.low != -_INFINITY))
        low, low_closed = piece.high, not piece.high_closed and piece.high != _INFINITY
    if floating(low) < _INFINITY:
        gaps.append(Piece(low, low_closed, _INFINITY, False))
    return RealSet(tuple(gaps))


def _intersection(one: RealSet, other: RealSet) -> RealSet:
    return _complement(_union([_complement(one), _complement(other)]))
