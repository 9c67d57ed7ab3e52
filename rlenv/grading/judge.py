r"""A final answer and a reference go in, a `Verdict` comes out: the one place where a verdict is decided.

Runs in a worker process, and raises `mathverify.NotLoaded` where that must be loaded first. The first of these that
applies decides: the two are one notation; the reference is a choice, words, or readable mathematics; math-verify
reads what our grammar does not cover.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rlenv.grading import mathverify
from rlenv.grading.compare import same_answer
from rlenv.grading.evaluate import NotScalar, TooLarge, Undefined, evaluate
from rlenv.grading.lexer import Token, Uncovered, Unreadable, tokenize
from rlenv.grading.nodes import Answer
from rlenv.grading.parser import parse
from rlenv.grading.scalars import symbols
from rlenv.grading.verdict import Verdict

_LETTER_UNIT = re.compile(r"\d\s*(?:\\[,;: ]\s*)?[a-zA-Z](?:\s*\^\s*\{?\d\}?)?(?:\s*/\s*[a-zA-Z])?\s*$")
_TIGHT_COMMA = re.compile(r"\d,\d{3}(?!\d)")
_UPRIGHT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_PROSE = re.compile(r"[^\\{}^=+*/<>|%&#~\[\]]*")
_CHOSEN = re.compile(r"(?:\\(?:text\w*|mathrm|mathbf)\s*\{)?\s*(?:[Oo]ption\s|[Cc]hoice\s)?\(?([A-Z])(?:[).:]|\s*\}|$)")
_MORE_CHOICES = re.compile(r"\b(?:and|or)\b|,")
_GROUPING = frozenset({"{", "}", "(", ")"})


def judge(candidate: str, reference: str) -> Verdict:
    """Whether the final answer `candidate` says what `reference` says."""
    if not reference.strip():
        return Verdict(False, "the reference is empty: nothing equals it")
    if _is_one_notation(candidate, reference):
        return Verdict(True, "the same notation")
    if letter := _choice(reference):
        return _said(_choice_made(candidate) == letter, "choice")
    if words := _words(reference):
        if _words(candidate) == words:
            return Verdict(True, "the same words")
        if _is_prose(reference):
            return Verdict(False, "other words")
    problem = reference_problem(reference)
    if problem is not None:
        return Verdict(None, f"the reference cannot be judged by: {problem}")
    return _judge_mathematics(candidate, reference)


def reference_problem(reference: str) -> str | None:
    """Why nothing can be graded against this reference; None if it is usable."""
    if not reference.strip():
        return "it is empty"
    if _choice(reference) or (_words(reference) and _is_prose(reference)):
        return None
    try:
        for reading in _readings(reference):
            _check_values(reading.answer)
    except Uncovered:
        return None if mathverify.reads(reference) else "math-verify cannot read it either"
    except (Unreadable, TooLarge, Undefined) as error:
        return str(error)
    return None


def _said(same: bool, what: str) -> Verdict:
    return Verdict(same, f"{'the same' if same else 'another'} {what}")


def _judge_mathematics(candidate: str, reference: str) -> Verdict:
    try:
        pairs = [(one, other) for one in _readings(reference) for other in _readings(candidate)]
        return _said(any(_comparable(*pair) and same_answer(pair[0].answer, pair[1].answer) for pair in pairs), "value")
    except Uncovered:
        if any(token.kind == "word" and len(token.text) > 2 for token in tokenize(candidate)):
            return Verdict(False, "the final answer cannot be read: words stand among symbols")
        return _said(mathverify.same(candidate, reference), "value, by math-verify")
    except Unreadable as error:
        return Verdict(False, f"the final answer cannot be read: {error}")
    except (TooLarge, Undefined) as error:
        return Verdict(False, f"the final answer has no value to compare: {error}")


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to read a text; `guessed_unit` where a letter was taken for a unit."""

    answer: Answer
    guessed_unit: bool = False

    @property
    def states_unit(self) -> bool:
        return any(statement.unit is not None for statement in self.answer.statements)


def _readings(text: str) -> list[_Reading]:
    """Every way to read the text: a tight `12,500` may be one number or two, the m of `5 m` metres or a symbol."""
    readings = [_Reading(parse(tokenize(text)))]
    if _LETTER_UNIT.search(text):
        readings += _tried(lambda: _Reading(parse(tokenize(text), letters_are_units=True), guessed_unit=True))
    if _TIGHT_COMMA.search(text):
        readings += _tried(lambda: _Reading(parse(tokenize(text, commas_group=False))))
    return readings


def _comparable(one: _Reading, other: _Reading) -> bool:
    """A guessed unit is believed only beside a stated one: 3m is not 3."""
    return (other.states_unit or not one.guessed_unit) and (one.states_unit or not other.guessed_unit)


def _tried(read: Callable[[], _Reading]) -> list[_Reading]:
    try:
        return [read()]
    except Unreadable:
        return []


def _check_values(answer: Answer) -> None:
    """Raise where a number of the answer has no value."""
    for statement in answer.statements:
        for part in statement.parts:
            if not symbols(part):
                try:
                    evaluate(part, {})
                except NotScalar:
                    continue


def _is_one_notation(one: str, other: str) -> bool:
    try:
        return tokenize(one) == tokenize(other)
    except Unreadable:
        return one.split() == other.split()


def _choice(text: str) -> str | None:
    """The letter of a reference that is one choice out of several: C, (C), \\text{C}."""
    tokens = _bare_tokens(text)
    if len(tokens) == 1 and tokens[0].kind == "sym" and re.fullmatch("[A-Z]", tokens[0].text):
        return tokens[0].text
    return None


def _choice_made(text: str) -> str | None:
    """The letter that a response chooses: alone, or before its option as in `(C) 12`, `C. 12`, `C: 12`."""
    match = _CHOSEN.match(text.strip())
    if match:
        return None if _MORE_CHOICES.search(text.strip(), match.end()) else match.group(1)
    tokens = _bare_tokens(text)
    return tokens[0].text.upper() if len(tokens) == 1 and tokens[0].kind == "sym" and len(tokens[0].text) == 1 else None


def _bare_tokens(text: str) -> list[Token]:
    try:
        return [token for token in tokenize(text) if token.text not in _GROUPING]
    except Unreadable:
        return []


def _words(text: str) -> list[str]:
    """The words and numbers of an answer that has no notation: `\\text{Yes}` and `yes.` are the same words."""
    plain = _UPRIGHT.sub(r" \1 ", text).replace("$", " ")
    if not _PROSE.fullmatch(plain):
        return []
    words = re.findall(r"[^\W\d_]+|\d+(?:[.,]\d+)*", plain.casefold())
    return words if any(len(word) > 1 and not word[0].isdigit() for word in words) else []


def _is_prose(text: str) -> bool:
    """Whether words are all there is to it: they are no product, list or quantity."""
    try:
        _readings(text)
    except Uncovered:
        return False
    except Unreadable:
        return True
    return False
