r"""The grammar of expressions: from the tokens at a cursor to a `Node`, one method a level of precedence.

Precedence is that of school notation: `1/2x` is (1/2)·x, `-x^2` is -(x^2), `\sin 2x` is sin(2x), `2\frac12` is 5/2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction

from rlenv.grading.lexer import Token, Uncovered, Unreadable
from rlenv.grading.nodes import Answer, App, Const, Node, Num, Sym
from rlenv.grading.units import UNITS, Unit, unit_of

MAX_DEPTH = 50
MAX_EXPONENT = 5_000  # of scientific notation, whose digits are written out
END = Token("env", "end of answer")
_PLACED_AFTER = ("!", "%", "deg", "'")


class Expressions(ABC):
    """Reads one expression at its cursor, loosest level first. Brackets hold whole answers: a subclass reads those."""

    def __init__(self, tokens: tuple[Token, ...], letters_are_units: bool) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.letters_are_units = letters_are_units
        self.bars = 0  # how many | are open: inside, a | closes
        self.money: Unit | None = None  # the currency sign met in this statement

    @abstractmethod
    def answer(self) -> Answer: ...

    @abstractmethod
    def bracketed(self, opening: str) -> Node: ...

    @abstractmethod
    def absolute(self) -> Node: ...

    @abstractmethod
    def matrix(self, name: str) -> Node: ...

    # the cursor -------------------------------------------------------------------------------------------------

    @property
    def peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def next_is(self, kind: str, *texts: str) -> bool:
        return self.peek.kind == kind and (not texts or self.peek.text in texts)

    def take(self) -> Token:
        token = self.peek
        self.at += 1
        return token

    def expect(self, kind: str, *texts: str) -> Token:
        if not self.next_is(kind, *texts):
            raise Unreadable(f"expected {' or '.join(texts) or kind}, not {self.peek.text!r}")
        return self.take()

    # levels of precedence ---------------------------------------------------------------------------------------

    def expression(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("it nests too deeply to be an answer")
        node = self.sum()
        while self.next_is("set") or self.next_is("op", "over", "choose"):
            op = self.take().text
            node = App({"over": "div", "choose": "binom"}.get(op, op), (node, self.sum()))
        self.depth -= 1
        return node

    def sum(self) -> Node:
        terms = [self.term()]
        while self.next_is("op", "+", "-", "pm", "mp"):
            op = self.take().text
            term = self.term()
            if op in ("pm", "mp"):
                terms = [App(op, (terms[0] if len(terms) == 1 else App("add", tuple(terms)), term))]
            else:
                terms.append(term if op == "+" else App("neg", (term,)))
        return terms[0] if len(terms) == 1 else App("add", tuple(terms))

    def term(self) -> Node:
        node = self.signed()
        while True:
            if self.next_is("op", "*"):
                self.take()
                node = App("mul", (node, self.signed()))
            elif self.next_is("op", "/"):
                self.take()
                node = App("div", (node, self.signed()))
            elif self.starts_factor():
                in_brackets = self.next_is("open")
                factor = self.power()
                node = App("mul", (node, factor)) if in_brackets else self.side_by_side(node, factor)
            else:
                return node

    def side_by_side(self, left: Node, right: Node) -> Node:
        """A product, or an integer before a proper fraction: a mixed number."""
        whole = isinstance(left, Num) and left.places is None
        if isinstance(right, Num):
            if not whole or not self.next_is("op", "/"):
                raise Unreadable("two numbers stand side by side")
            self.take()
            right = App("div", (right, self.power()))
        return App("add" if whole and _is_proper_fraction(right) else "mul", (left, right))

    def signed(self) -> Node:
        signs: list[str] = []
        while self.next_is("op", "+", "-", "pm", "mp"):
            signs.append(self.take().text)
            if len(signs) > MAX_DEPTH:
                raise Unreadable("it has too many signs")
        node = self.power()
        for sign in reversed(signs):
            node = node if sign == "+" else App("neg" if sign == "-" else sign, (node,))
        return node

    def power(self) -> Node:
        node = self.postfix(self.primary())
        if not self.next_is("op", "^"):
            return node
        self.take()
        return self.postfix(App("pow", (node, self.exponent())))

    def exponent(self) -> Node:
        return self.group() if self.next_is("open", "{") else self.signed()

    def postfix(self, node: Node) -> Node:
        while self.next_is("op", *_PLACED_AFTER):
            op = self.take().text
            if op == "'" and isinstance(node, Sym):
                node = Sym(node.name + "'")
            elif op == "'" or (isinstance(node, App) and node.op in _PLACED_AFTER):
                raise Unreadable(f"{op!r} stands where it cannot")
            else:
                node = App(op, (node,))
        return node

    # what a factor may begin with -------------------------------------------------------------------------------

    def starts_factor(self) -> bool:
        token = self.peek
        match token.kind:
            case "num" | "func" | "cmd":
                return True
            case "const":
                return token.text in ("pi", "inf")
            case "open":
                return True
            case "op":
                return token.text == "|" and not self.bars
            case "word":
                return self.word_is_product()
            case "sym":
                measures = token.upright or (self.letters_are_units and self.tokens[self.at - 1].kind == "num")
                return not (measures and token.text in UNITS)
        return False

    def word_is_product(self) -> bool:
        """`xy` is x·y; a longer word, a unit or word after a value, or a name before a bracket is not."""
        token = self.peek
        if token.upright or len(token.text) > 3:
            return False
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else END
        called = following.kind == "open" and len(token.text) > 2
        after_value = self.at > 0 and self.tokens[self.at - 1].kind in ("num", "close")
        measures = token.text.lower() in UNITS or (token.spaced and len(token.text) > 2)
        return not called and not (after_value and measures)

    def primary(self) -> Node:
        token = self.peek
        if token.kind == "word" and self.word_is_product():
            return self.product(token.text)
        self.take()
        match token:
            case Token("num", text):
                return self.based(_number(text))
            case Token("sym", text):
                return Sym(self.subscripted(text))
            case Token("const", text):
                return Const(text)
            case Token("func", text):
                return self.function(text)
            case Token("cmd", text):
                return self.command(text)
            case Token("open", text):
                return self.bracketed(text)
            case Token("env", text) if text.startswith("begin "):
                return self.matrix(text.removeprefix("begin "))
            case Token("op", "money"):
                self.money = unit_of(["dollar"])
                return self.primary()
            case Token("op", "|") if not self.bars:
                return self.absolute()
        raise Unreadable(f"{token.text!r} stands where a value should")

    def product(self, letters: str) -> Node:
        """`xy` is x·y, and of `xy^2` or `xy_1` the y alone has the exponent or index."""
        last = Token("sym", letters[-1])
        self.tokens = (*self.tokens[: self.at], last, *self.tokens[self.at + 1 :])
        return App("mul", (*map(Sym, letters[:-1]), self.power()))

    def based(self, number: Num) -> Node:
        """`1011_2`: the base is part of how a number is written, so it is kept beside its digits."""
        return App("based", (number, Sym(self.subscripted("")))) if self.next_is("op", "_") else number

    def subscripted(self, name: str) -> str:
        while self.next_is("op", "_"):
            self.take()
            if self.next_is("open", "{"):
                name += "_" + self.group_text()
            elif self.peek.kind in ("num", "sym", "word", "const"):
                name += "_" + self.take().text
            else:
                raise Unreadable("a subscript is missing")
        return name

    def group_text(self) -> str:
        start, depth = self.at, 0
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if token is END:
                raise Unreadable("a brace is not closed")
            if depth == 0:
                return "".join(each.text for each in self.tokens[start + 1 : self.at - 1])

    def group(self) -> Node:
        self.expect("open", "{")
        node = self.expression()
        self.expect("close", "}")
        return node

    # functions and commands -------------------------------------------------------------------------------------

    def function(self, name: str) -> Node:
        if name == "sqrt":
            return self.root()
        base = power = None
        if name == "log" and self.next_is("op", "_"):
            self.take()
            base = self.group() if self.next_is("open", "{") else self.primary()
        if self.next_is("op", "^"):
            self.take()
            power = self.exponent()
        argument = self.argument()
        if power == App("neg", (Num(Fraction(1)),)) and name in ("sin", "cos", "tan"):
            return App(f"a{name}", (argument,))
        node = App(name, (argument,) if base is None else (argument, base))
        return node if power is None else App("pow", (node, power))

    def root(self) -> Node:
        degree: Node = Num(Fraction(2))
        if self.next_is("open", "["):
            self.take()
            degree = self.expression()
            self.expect("close", "]")
        return App("root", (self.primary(), degree))

    def argument(self) -> Node:
        """What a function without brackets takes: the factors up to a sign, a relation or the next function."""
        if self.next_is("open"):
            return self.primary()
        node = self.power()
        while self.starts_factor() and self.peek.kind not in ("func", "open"):
            node = self.side_by_side(node, self.power())
        return node

    def command(self, name: str) -> Node:
        if name == "overline":
            return Sym("overline " + "".join(_letters(self.group())))
        if name in ("sum", "prod"):
            return self.iterated(name)
        parts = [self.group() if self.next_is("open", "{") else self.primary() for _ in range(2)]
        return App("div" if name == "frac" else "binom", tuple(parts))

    def iterated(self, name: str) -> Node:
        r"""`\sum_{k=1}^{n} …` over everything up to the next sign or relation."""
        self.expect("op", "_")
        self.expect("open", "{")
        index, equals = self.take(), self.take()
        if index.kind != "sym" or equals != Token("rel", "="):
            raise Uncovered(f"the range of a {name} is no interval of integers")
        low = self.expression()
        self.expect("close", "}")
        self.expect("op", "^")
        high = self.exponent()
        if high == Const("inf"):
            raise Uncovered(f"a {name} has no end")
        return App(name, (Sym(index.text), low, high, self.term()))


def _number(text: str) -> Num:
    if text.endswith(")"):  # 0.1(6), one sixth
        head, _, period = text[:-1].partition("(")
        whole, _, fixed = head.partition(".")
        value = Fraction(int((whole + fixed) or "0")) + Fraction(int(period), 10 ** len(period) - 1)
        return Num(value / 10 ** len(fixed))
    mantissa, _, exponent = text.partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unreadable("an exponent is too large to write out")
    places = len(mantissa.partition(".")[2]) if "." in mantissa and not exponent else None
    return Num(Fraction(mantissa) * Fraction(10) ** int(exponent or 0), places)


def _is_proper_fraction(node: Node) -> bool:
    match node:
        case App("div", (Num(top, None), Num(bottom, None))):
            return 0 < top < bottom
    return False


def _letters(node: Node) -> list[str]:
    """The letters of a product, in order: what stands under a bar."""
    match node:
        case Sym(name):
            return [name]
        case App("mul", args):
            return [letter for arg in args for letter in _letters(arg)]
    raise Unreadable("only a name stands under a bar")
