r"""A reference and a response, both read, go in; whether they say the same comes out.

What each kind of answer may equal is stated in the docstring of `rlenv.grading`; the functions below follow it in
order: a name before `=` is dropped, sets of reals are compared as sets, lists without order, points in order,
equations up to a constant factor, quantities up to their units, and at the leaves numbers or functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from rlenv.grading.evaluate import NotScalar
from rlenv.grading.lexer import Unreadable
from rlenv.grading.nodes import Answer, App, Matrix, Node, Num, Seq, Statement, Sym
from rlenv.grading.reals import real_set, same_set
from rlenv.grading.scalars import equal, proportional, symbols
from rlenv.grading.units import Unit, conversion

T = TypeVar("T")

MAX_ITEMS = 64
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def same_answer(reference: Answer, response: Answer) -> bool:
    """Raises TooLarge or Undefined where a number that matters has no value."""
    left_name, left = _unnamed(_settled(reference))
    right_name, right = _unnamed(_settled(response))
    if _names_agree(left_name, right_name) and _same_values(_settled(left), _settled(right)):
        return True
    return _same_relations(reference, response)


# names before an equals sign ------------------------------------------------------------------------------------


def _unnamed(answer: Answer) -> tuple[Node | None, Answer]:
    """`n = 2, 5` → n and (2, 5); `x = 1 or x = 2` → x and (1, 2); `x = 1, y = 2` keeps its names."""
    split = [_split(statement) for statement in answer.statements]
    name = split[0][0]
    if name is None:
        return None, answer
    if any(other is not None and other != name for other, _ in split):
        return None, answer
    return name, Answer(tuple(rest for _, rest in split), answer.joint)


def _split(statement: Statement) -> tuple[Node | None, Statement]:
    """The name that a statement gives its value, and the rest."""
    parts, relations = statement.parts, statement.relations
    if relations and relations[0] in ("=", "in", "~") and _is_name(parts[0]):
        rest = Statement(parts[1:], relations[1:], statement.unit)
        if not symbols(parts[0]) & frozenset().union(*map(symbols, rest.parts)):
            return parts[0], rest
    if relations == ("=",) and _is_name(parts[1]) and not symbols(parts[0]):
        return parts[1], Statement(parts[:1], (), statement.unit)
    return None, statement


def _is_name(node: Node) -> bool:
    """Symbols alone, also combined: x, AB, x + y, (x, y)."""
    match node:
        case Sym():
            return bool(symbols(node))
        case App("add" | "mul" | "div" | "neg", args):
            return all(map(_is_name, args))
        case Seq("(", ")", items):
            return all(not item.relations and _is_name(item.parts[0]) for item in items)
    return False


def _names_agree(one: Node | None, other: Node | None) -> bool:
    """N is n; f(x) and y both name a dependent value; f(x) and g(x) are two."""
    if one is None or other is None or one == other:
        return True
    if isinstance(one, Sym) and isinstance(other, Sym):
        both_are_called = one.name.endswith(")") and other.name.endswith(")")
        one_is_called = not both_are_called and ")" in one.name + other.name
        return one.name.casefold() == other.name.casefold() or one_is_called
    return not isinstance(one, Seq) and not isinstance(other, Seq) and equal(one, other)


def _settled(answer: Answer) -> Answer:
    """Each chain of equal parts becomes its last exact part, each ± two statements."""
    statements = [half for statement in answer.statements for half in _halves(_last_part(statement))]
    if len(statements) > MAX_ITEMS:
        raise Unreadable(f"more than {MAX_ITEMS} items")
    return Answer(tuple(statements), answer.joint)


def _last_part(statement: Statement) -> Statement:
    parts, relations = list(statement.parts), list(statement.relations)
    while relations and relations[-1] == "~" and len(parts) > 1:  # an approximation adds nothing to what it follows
        if _is_name(parts[0]) and len(parts) == 2:
            break
        parts.pop()
        relations.pop()
    chained = relations and set(relations) == {"="}
    if chained and all(_equal_nodes(one, parts[-1]) for one in parts[:-1]):
        return Statement((parts[-1],), (), statement.unit)
    if len(relations) > 1 and chained and _is_name(parts[0]):
        rest = _last_part(Statement(tuple(parts[1:]), tuple(relations[1:]), statement.unit))
        if not rest.relations:
            return Statement((parts[0], *rest.parts), ("=",), statement.unit)
    return Statement(tuple(parts), tuple(relations), statement.unit)


def _halves(statement: Statement) -> list[Statement]:
    """The statement with + and with - for its ±; within a set, ± makes two members."""
    whole = Statement(tuple(map(_spread_sets, statement.parts)), statement.relations, statement.unit)
    halves = [
        Statement(tuple(_with_sign(part, sign) for part in whole.parts), whole.relations, whole.unit)
        for sign in (1, -1)
    ]
    return halves if halves[0] != halves[1] else halves[:1]


def _spread_sets(node: Node) -> Node:
    match node:
        case App(op, args):
            return App(op, tuple(map(_spread_sets, args)))
        case Seq("{" as opening, closing, items, such):
            return Seq(opening, closing, tuple(half for item in items for half in _halves(item)), such)
        case Seq(opening, closing, items):
            spread = tuple(Statement(tuple(map(_spread_sets, i.parts)), i.relations, i.unit) for i in items)
            return Seq(opening, closing, spread)
    return node


def _with_sign(node: Node, sign: int) -> Node:
    """± as `sign`, ∓ as its opposite."""
    match node:
        case App("pm" | "mp" as op, args):
            positive = (sign > 0) == (op == "pm")
            *left, right = (_with_sign(arg, sign) for arg in args)
            term = right if positive else App("neg", (right,))
            return App("add", (*left, term)) if left else term
        case App(op, args):
            return App(op, tuple(_with_sign(arg, sign) for arg in args))
        case Seq(opening, closing, items, such):
            signed = tuple(
                Statement(tuple(_with_sign(part, sign) for part in item.parts), item.relations, item.unit)
                for item in items
            )
            return Seq(opening, closing, signed, such)
    return node


# values ---------------------------------------------------------------------------------------------------------


def _same_values(reference: Answer, response: Answer) -> bool:
    left_set, right_set = real_set(reference), real_set(response)
    if left_set and right_set and (left_set.certain or right_set.certain):
        return same_set(left_set, right_set)
    left_kind, left = _items(reference)
    right_kind, right = _items(response)
    if {left_kind, right_kind} <= {"", "{}"}:
        if _distinctly_named(left) != _distinctly_named(right):
            return _pairwise(_same_statement, [_split(s)[1] for s in left], [_split(s)[1] for s in right])
        return _unordered(_same_statement, left, right)
    if left_kind == right_kind:
        return _pairwise(_same_statement, left, right)
    if "" in (left_kind, right_kind) and {left_kind, right_kind} & {"()", "[]"}:
        return len(left) > 1 and _pairwise(_same_statement, [_split(s)[1] for s in left], [_split(s)[1] for s in right])
    return False


def _items(answer: Answer) -> tuple[str, tuple[Statement, ...]]:
    """What the answer lists, and in which brackets: "" for none."""
    if len(answer.statements) == 1:
        match answer.statements[0]:
            case Statement((Seq(opening, closing, items, such=False),), (), None):
                return opening + closing, items
    return "", answer.statements


def _distinctly_named(statements: Sequence[Statement]) -> bool:
    return len(statements) > 1 and all(_split(statement)[0] is not None for statement in statements)


def _unordered(same: Callable[[T, T], bool], left: Sequence[T], right: Sequence[T]) -> bool:
    """Equal as sets."""
    return all(any(same(one, other) for other in right) for one in left) and all(
        any(same(one, other) for one in left) for other in right
    )


def _pairwise(same: Callable[[T, T], bool], left: Sequence[T], right: Sequence[T]) -> bool:
    return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))


def _same_statement(left: Statement, right: Statement) -> bool:
    if left.relations and right.relations:
        return same_relation(left, right)
    if ":" in left.relations + right.relations:
        return _same_ratio(left, right)
    left, right = _split(left)[1], _split(right)[1]
    if left.relations or right.relations:
        return False
    return _same_quantity(left, right)


def _same_quantity(left: Statement, right: Statement) -> bool:
    """A unit that only one side states is taken for granted; p % is also p/100, and degrees also radians."""
    (one, one_unit), (other, other_unit) = _quantity(left), _quantity(right)
    if one_unit == other_unit:
        return _equal_nodes(one, other)
    if one_unit is None or other_unit is None:
        bare, measured = (one, right.parts[0]) if one_unit is None else (other, left.parts[0])
        return _equal_nodes(one, other) or (measured not in (one, other) and _equal_nodes(bare, measured))
    if isinstance(one_unit, str) or isinstance(other_unit, str):
        return False
    factor = conversion(one_unit, other_unit)
    return factor is not None and _equal_nodes(App("mul", (one, Num(factor))), other)


def _quantity(statement: Statement) -> tuple[Node, Unit | str | None]:
    match statement.parts[0]:
        case App("%" | "deg" as op, (value,)):
            return value, op
        case App("based", (value, Sym(base))):
            return value, base
        case App("neg", (App("%" | "deg" as op, (value,)),)):
            return App("neg", (value,)), op
    return statement.parts[0], statement.unit


def _equal_nodes(left: Node, right: Node) -> bool:
    if left == right:
        return True
    match left, right:
        case Matrix(rows), Matrix(others):
            return _pairwise(lambda a, b: _pairwise(_equal_nodes, a, b), rows, others)
        case Seq(), Seq():
            return _same_values(Answer((Statement((left,)),)), Answer((Statement((right,)),)))
        case App("cup" | "cap" as op, _), App(other, _) if op == other:
            return _unordered(_equal_nodes, _flat(op, left), _flat(op, right))
    try:
        return equal(left, right)
    except NotScalar:
        return False


def _flat(op: str, node: Node) -> list[Node]:
    if isinstance(node, App) and node.op == op:
        return [leaf for arg in node.args for leaf in _flat(op, arg)]
    return [node]


# relations ------------------------------------------------------------------------------------------------------


def _same_relations(reference: Answer, response: Answer) -> bool:
    left, right = reference.statements, response.statements
    if not all(statement.relations for statement in (*left, *right)):
        return False
    return _unordered(same_relation, left, right)


def same_relation(left: Statement, right: Statement) -> bool:
    """Equations and inequalities of two sides: one a constant multiple of the other, or solved for a symbol."""
    if ":" in left.relations + right.relations:
        return _same_ratio(left, right)
    if left.relations == right.relations and _pairwise(_equal_nodes, left.parts, right.parts):
        return True
    if len(left.parts) != 2 or len(right.parts) != 2:
        return False
    try:
        sign = proportional(_difference(left), _difference(right))
        if sign is not None:
            relation = right.relations[0]
            return left.relations[0] == (relation if sign > 0 else _MIRRORED.get(relation, relation))
        return left.relations == right.relations == ("=",) and (_solves(left, right) or _solves(right, left))
    except NotScalar:
        return False


def _difference(statement: Statement) -> Node:
    return App("add", (statement.parts[0], App("neg", (statement.parts[1],))))


def _solves(solved: Statement, equation: Statement) -> bool:
    """`y = g(x)` solves an equation that is linear in y, if putting g(x) for y makes it an identity."""
    name, rest = _split(solved)
    if not isinstance(name, Sym) or name.name not in symbols(_difference(equation)):
        return False
    at = [_substituted(_difference(equation), name, value) for value in (rest.parts[0], *map(_whole, range(3)))]
    bend = App("add", (at[1], at[3], App("neg", (App("mul", (_whole(2), at[2])),))))
    return equal(at[0], _whole(0)) and equal(bend, _whole(0)) and not equal(at[1], at[2])


def _whole(value: int) -> Num:
    return Num(Fraction(value))


def _substituted(node: Node, name: Sym, value: Node) -> Node:
    if node == name:
        return value
    if isinstance(node, App):
        return App(node.op, tuple(_substituted(arg, name, value) for arg in node.args))
    return node


def _same_ratio(left: Statement, right: Statement) -> bool:
    """a:b is a quotient, unless both sides could be times of day."""
    if _pairwise(_equal_nodes, left.parts, right.parts):
        return left.relations == right.relations and (left.unit == right.unit or None in (left.unit, right.unit))
    if _is_time(left) and _is_time(right):
        return False
    if len(left.parts) == 1 or len(right.parts) == 1:
        ratio, value = (left, right) if len(right.parts) == 1 else (right, left)
        return ratio.relations == (":",) and _equal_nodes(App("div", ratio.parts), value.parts[0])
    scaled = [App("mul", (part, right.parts[0])) for part in left.parts]
    others = [App("mul", (part, left.parts[0])) for part in right.parts]
    return left.relations == right.relations and _pairwise(_equal_nodes, scaled, others)


def _is_time(statement: Statement) -> bool:
    match statement.parts:
        case (Num(hour, None), Num(minute, None)):
            return hour < 24 and (minute == 0 or 10 <= minute < 60)
    return False
