r"""Tokens go in, an `Answer` comes out, or Unreadable: lists, relations, units and brackets.

>>> parse(tokenize(r"x < 1 \text{ or } x \ge 3")).joint
'or'

Building the tree computes nothing.
"""

from __future__ import annotations

from rlenv.grading.expressions import END, Expressions
from rlenv.grading.lexer import Token, Uncovered, Unreadable
from rlenv.grading.nodes import Answer, App, Const, Matrix, Node, Seq, Statement, Sym
from rlenv.grading.units import UNITS, Unit, unit_of

_INVERSE = (Token("open", "{"), Token("op", "-"), Token("num", "1"), Token("close", "}"))
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix")


def parse(tokens: tuple[Token, ...], *, letters_are_units: bool = False) -> Answer:
    """The answer that the tokens write. `letters_are_units` reads the m of `5 m` as metres.

    Raises Unreadable, and Uncovered where math-verify may read on.
    """
    if not tokens:
        raise Unreadable("nothing is there")
    for token in tokens:
        if token.kind == "uncovered":
            raise Uncovered(f"\\{token.text} is beyond this grammar")
    parser = _Parser(tokens, letters_are_units)
    answer = parser.answer()
    if parser.peek is not END:
        raise Unreadable(f"{parser.peek.text!r} stands where nothing can")
    return answer


class _Parser(Expressions):
    """The levels above expressions, and the brackets that hold them."""

    def answer(self) -> Answer:
        statements, joint = [self.statement()], ","
        while self.next_is("sep") or self.next_is("and"):
            while self.next_is("sep") or self.next_is("and"):
                token = self.take()
                joint = token.text if token.kind == "and" else joint
            if self.peek is END or self.next_is("close"):
                break
            statements.append(self.statement())
        return Answer(tuple(statements), joint)

    def statement(self) -> Statement:
        self.money = None
        parts, relations = [self.called_name() or self.expression()], []
        while self.next_is("rel"):
            relations.append(self.take().text)
            parts.append(self.expression())
        unit = self.unit() or self.money
        return Statement(tuple(parts), tuple(relations), unit)

    def called_name(self) -> Node | None:
        """`f(x)` or `f^{-1}(x)` before an equals sign is a name, not a product."""
        start = self.at
        if self.next_is("sym") and not self.bars:
            self.subscripted(self.take().text)
            while self.next_is("op", "'"):
                self.take()
            if self.next_is("op", "^") and self.tokens[self.at + 1 : self.at + 5] == _INVERSE:
                self.at += 5
            if self.next_is("open", "("):
                self.take()
                while self.next_is("sym") or self.next_is("sep"):
                    self.take()
                if self.next_is("close", ")") and self.tokens[self.at + 1 : self.at + 2] == (Token("rel", "="),):
                    self.take()
                    return Sym("".join(token.text for token in self.tokens[start : self.at]))
        self.at = start
        return None

    def unit(self) -> Unit | None:
        """`cm`, `cm^2`, `km/h`, `square metres`, `students`: words after a value."""
        words: list[str] = []
        while self.next_is("word") or (self.next_is("sym") and self.letter_is_unit(words)):
            words.append(self.take().text)
            if self.next_is("op", "^"):
                self.take()
                braced = self.next_is("open", "{")
                self.at += braced
                words.append("^" + self.expect("num").text)
                self.at += braced
            elif self.next_is("op", "/"):
                words.append(self.take().text)
        return unit_of(words)

    def letter_is_unit(self, before: list[str]) -> bool:
        """Metres where letters are units, where it stands in \\text, and behind the stroke of `km/h`."""
        per = before[-1:] == ["/"] and self.peek.text in UNITS
        return self.letters_are_units or self.peek.upright or per

    def bracketed(self, opening: str) -> Node:
        outer, self.bars = self.bars, int(opening == "set{")  # in braces, a | comes before conditions
        money = self.money
        if opening == "set{" and self.next_is("close", "set}"):
            self.take()
            self.bars = outer
            return Const("empty")
        answer = self.answer()
        self.bars = outer
        if opening == "set{" and self.next_is("op", "|"):
            self.take()
            answer = self.answer()
            self.expect("close", "set}")
            return Seq("{", "}", answer.statements, such=True)
        closing = self.expect("close").text
        self.money = self.money or money
        return _closed(opening, closing, answer.statements)

    def absolute(self) -> Node:
        self.bars += 1
        node = self.expression()
        self.expect("op", "|")
        self.bars -= 1
        return App("abs", (node,))

    def matrix(self, name: str) -> Node:
        if name not in _MATRICES:
            raise Unreadable(f"the environment {name[:20]} is no answer")
        rows: list[tuple[Node, ...]] = []
        while not self.next_is("env", f"end {name}"):
            row = [self.expression()]
            while self.next_is("env", "&"):
                self.take()
                row.append(self.expression())
            rows.append(tuple(row))
            if not self.next_is("env", "row", f"end {name}"):
                raise Unreadable("a matrix is not closed")
            self.at += self.next_is("env", "row")
        self.take()
        if len({len(row) for row in rows}) != 1:
            raise Unreadable("the rows of a matrix differ in length")
        return Matrix(tuple(rows))


def _closed(opening: str, closing: str, items: tuple[Statement, ...]) -> Node:
    """Brackets around one value group it; around more they are a point, an interval, a list or a set."""
    alone = len(items) == 1 and not items[0].relations and items[0].unit is None
    if opening in ("floor", "ceil"):
        if closing != opening or not alone:
            raise Unreadable(f"a {opening} is not closed")
        return App(opening, items[0].parts)
    pair = opening.removeprefix("set") + closing.removeprefix("set")
    if pair not in ("()", "[]", "{}", "(]", "[)"):
        raise Unreadable(f"{opening!r} is closed by {closing!r}")
    if alone and opening != "set{" and pair in ("()", "[]", "{}"):
        return items[0].parts[0]
    return Seq(pair[0], pair[1], items)
