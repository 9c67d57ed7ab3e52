r"""An answer's text goes in, a flat tuple of tokens comes out: LaTeX and plain notation alike.

>>> [token.text for token in tokenize(r"\dfrac12 \leq x")]
['frac', '{', '1', '}', '{', '2', '}', '<=', 'x']

Nothing is evaluated here. Text that is no notation at all raises `Unreadable`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from rlenv.grading.notation import (
    ACCENTS,
    CHARACTERS,
    COMMANDS,
    DEGREE,
    DIGRAPHS,
    FUNCTIONS,
    GREEK,
    INFINITY,
    PERCENT,
    UNCOVERED,
    UNICODE,
    UPRIGHT,
    Kind,
)

MAX_CHARS = 10_000
MAX_TOKENS = 1_500


class Unreadable(ValueError):
    """The text is not an answer in any notation that is read here."""


class Uncovered(Unreadable):
    """Mathematics whose notation is known but not covered here: integrals, limits, endless sums."""


@dataclass(frozen=True, slots=True)
class Token:
    """One symbol of the notation; `text` is canonical, so that equal answers in other spellings compare equal."""

    kind: Kind
    text: str
    upright: bool = False  # it stood in \text{…} or the like: a word, not a product of letters
    spaced: bool = field(default=False, compare=False)  # a space stood before it


_NOISE = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|bf|it|tiny|small"
    r"|large|Large)(?![a-zA-Z])|(?<!\\)\\!\s*"
)
_ORDINAL = re.compile(r"\^\s*\{\s*\\(?:text|mathrm)\s*\{(?:st|nd|rd|th)\}\s*\}|(?<=\d)(?:st|nd|rd|th)\b")
_DEGREE_SIGN = re.compile(r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))")
_PRIME = re.compile(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))")
_BARE_ARGUMENTS = re.compile(r"(\\(?:[dtc]?frac|[dt]?binom))\s*(\d)\s*(\d|\{)")
_HALF_DAY = re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE)
_SPACE = re.compile(r"(?<!\\)\\(?:[,;:> ()\[\]]|(?:quad|qquad|thinspace|enspace|space)(?![a-zA-Z]))|~(?!=)|(?<!\\)\$")
_DOUBLED_BACKSLASH = re.compile(r"\\\\(?=[a-zA-Z])")
_COMMAND = re.compile(r"\\([a-zA-Z]+|[%${}])\*?")
_LETTERS = re.compile(r"[A-Za-z]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d{1,50})\}", re.ASCII)
_GROUPED = r"\d{1,3}(?:\{,\}\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)"
_GROUPED_BY_COMMA = r"\d{1,3}(?:,\d{3})+(?!\d)"
_NUMBER = {
    commas_group: re.compile(
        rf"(?:(?:{heads})(?:\.\d+)?|\d+\{{,\}}\d+|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\d.a-zA-Z]))?", re.ASCII
    )
    for commas_group, heads in ((False, _GROUPED), (True, f"{_GROUPED}|{_GROUPED_BY_COMMA}"))
}


def tokenize(text: str, *, commas_group: bool = True) -> tuple[Token, ...]:
    """The tokens of `text`; with `commas_group` a tight `12,500` is one number, else two items."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"it is longer than {MAX_CHARS} characters")
    tokens: list[Token] = []
    _scan(_clean(text), tokens, commas_group, upright=False)
    return tuple(tokens)


def _clean(text: str) -> str:
    """One spelling for what has many, and no typesetting."""
    text = _NOISE.sub("", text.translate(UNICODE))
    if "\\begin" not in text:  # there, a doubled backslash is a new row; elsewhere it is escaping gone wrong
        text = _DOUBLED_BACKSLASH.sub(r"\\", text)
    text = _PRIME.sub("'", _DEGREE_SIGN.sub(r"\\degree ", _ORDINAL.sub("", text)))
    text = _BARE_ARGUMENTS.sub(_brace_digits, _HALF_DAY.sub(r"\1m", text))
    return _SPACE.sub(" ", text).rstrip(" \n\t.,;\\").lstrip(" \n\t=")


def _brace_digits(match: re.Match[str]) -> str:
    command, top, bottom = match.groups()
    return f"{command}{{{top}}}" + (bottom if bottom == "{" else f"{{{bottom}}}")


def _scan(text: str, tokens: list[Token], commas_group: bool, *, upright: bool) -> None:
    at = 0
    while at < len(text):
        if len(tokens) > MAX_TOKENS:
            raise Unreadable(f"it has more than {MAX_TOKENS} symbols")
        char = text[at]
        if char.isspace() or (upright and char in ".?"):  # punctuation of a phrase says nothing
            at += 1
        elif match := _REPEATING.match(text, at):
            tokens.append(Token("num", "{}.{}({})".format(*match.groups())))
            at = match.end()
        elif match := _NUMBER[commas_group].match(text, at):
            tokens.append(Token("num", _number(match.group())))
            at = match.end()
        elif match := _LETTERS.match(text, at):
            tokens.append(replace(_word(match.group(), upright), spaced=at > 0 and text[at - 1].isspace()))
            at = match.end()
        elif text[at : at + 2] in DIGRAPHS:
            tokens.append(Token(*DIGRAPHS[text[at : at + 2]]))
            at += 2
        elif match := _COMMAND.match(text, at):
            at = _command(match.group(1), text, match.end(), tokens, commas_group)
        elif char in CHARACTERS:
            tokens.append(Token(*CHARACTERS[char]))
            at += 1
        else:
            raise Unreadable(f"{char!r} is no notation")


def _number(text: str) -> str:
    if re.fullmatch(r"\d+\{,\}\d+", text) and len(text.partition("{,}")[2]) != 3:
        text = text.replace("{,}", ".")  # the decimal comma of LaTeX
    return text.replace("{,}", "").replace(",", "").replace(" ", "").lower()


def _word(run: str, upright: bool) -> Token:
    word = run.lower()
    if word in ("and", "or"):
        return Token("and", word)
    if word in PERCENT:
        return Token("op", "%")
    if word in DEGREE:
        return Token("op", "deg")
    if len(run) == 1:
        return Token("sym", run, upright)
    if not upright and word in FUNCTIONS:
        return Token("func", word)
    if not upright and (word == "pi" or word in INFINITY):
        return Token("const", "pi" if word == "pi" else "inf")
    return Token("word", run, upright)


def _command(name: str, text: str, at: int, tokens: list[Token], commas_group: bool) -> int:
    """Append what the command stands for; return where scanning goes on."""
    if name in UPRIGHT:
        content, at = _argument(text, at)
        if name == "operatorname" and content in FUNCTIONS:
            tokens.append(Token("func", content))
        else:
            _scan(content, tokens, commas_group, upright=True)
    elif name in ACCENTS:
        content, at = _argument(text, at)
        reals = (name, content) == ("mathbb", "R")
        tokens.append(Token("const", "reals") if reals else Token("sym", f"{name} {content}"))
    elif name in ("begin", "end"):
        content, at = _argument(text, at)
        if content == "array" and name == "begin":
            at = _argument(text, at)[1]  # the layout of its columns
        tokens.append(Token("env", f"{name} {content.rstrip('*')}"))
    elif name in FUNCTIONS:
        tokens.append(Token("func", name))
    elif name in COMMANDS:
        tokens.append(Token(*COMMANDS[name]))
    elif name in GREEK:
        tokens.append(Token("sym", name))
    elif name in UNCOVERED:
        tokens.append(Token("uncovered", name))
    elif name not in ("boxed", "fbox"):  # of a box in a box only the braces count
        raise Unreadable(f"\\{name[:20]} is no notation")
    return at


def _argument(text: str, at: int) -> tuple[str, int]:
    """The content of the `{…}` at `at`, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    if not text.startswith("{", at):
        raise Unreadable("a command lacks its argument")
    depth = 0
    for match in _BRACE.finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[at + 1 : match.start()].strip(), match.end()
    raise Unreadable("a brace is not closed")
