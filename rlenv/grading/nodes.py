r"""What an answer is made of once it is read: statements of expressions, as plain trees.

>>> # n = 2, 5      Answer of two statements: Sym("n") = Num(2), and Num(5)
>>> # (0, 2]        Answer of one statement: Seq("(", "]", (Num(0), Num(2)))
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rlenv.grading.units import Unit


@dataclass(frozen=True, slots=True)
class Num:
    """A number as written; `places` counts the digits after its decimal point, None where it has none."""

    value: Fraction
    places: int | None = None


@dataclass(frozen=True, slots=True)
class Sym:
    """A letter, Greek or with subscripts, or a name such as f(x); i and e are numbers."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """pi, inf, reals or empty."""

    name: str


@dataclass(frozen=True, slots=True)
class App:
    """An operation on expressions: `App("add", (a, b))`."""

    op: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """Bracketed statements: `open` is one of ( [ { and `close` one of ) ] }; `such` marks {x | conditions}."""

    open: str
    close: str
    items: tuple[Statement, ...]
    such: bool = False


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Node, ...], ...]


Node = Num | Sym | Const | App | Seq | Matrix


@dataclass(frozen=True, slots=True)
class Statement:
    """`parts[0] relations[0] parts[1] …`, then a unit: one part is a value, more are a relation."""

    parts: tuple[Node, ...]
    relations: tuple[str, ...] = ()
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Statements side by side; `joint` is the word that joins them, `and` or `or`, or else a comma."""

    statements: tuple[Statement, ...]
    joint: str = ","
