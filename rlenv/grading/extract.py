r"""A response goes in, the text of its final answer comes out: which of the things it says is meant.

Policy, in this order:
1. Only what follows the last `</think>` counts.
2. If anything is boxed, the last box is the answer; boxes side by side (`\boxed{2}, \boxed{3}`) are one list. An empty
   or unclosed last box is no answer, whatever stood in the boxes before it.
3. Else what follows the last `<answer>`, `####`, `final answer:` or `answer is`, in this order of preference, as far
   as it is notation rather than prose.
4. Else the last line, if it is nothing but notation, bold or delimited as a formula, or ends in `is …` or `= …`.

Every step is linear in the length of the response, since this runs in the caller's process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from rlenv.grading.notation import DEGREE, FUNCTIONS, INFINITY, PERCENT, words
from rlenv.grading.units import POWER_WORDS, UNITS

MAX_TAIL = 2_000  # characters after a marker, and of a last line, in which the answer is looked for


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """`text` is None where the response gives no final answer; `reason` then says why."""

    text: str | None
    reason: str = ""


_CONTROL_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,9}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"\d+|\w")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;&]|[a-zA-Z]\s?=|\\[,;: ()\[\]]|\\quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*"
)
_AFTER_BOX = re.compile(
    r"[\s$]{0,4}(?:(\\?%|\^\s?\{?\\circ\}?|°)|\\(?:text|mathrm)\{\s?([a-zA-Z]{1,20})\s?\}|([a-zA-Z]{2,20})\b)"
)
_SAYS = r"(?=[*_ \t]{0,6}(?:is\b|are\b|should\s+be\b|must\s+be\b|would\s+be\b|:|=))"
_HEADING = r"^[ \t*_#>]{0,8}(?:the\s)?"
_MARKERS = (
    re.compile(r"<answer>"),
    re.compile(r"####"),
    re.compile(
        rf"\bfinal\s{{1,9}}answer\b{_SAYS}|{_HEADING}final\s{{1,9}}answer[ \t*_]{{0,6}}$", re.IGNORECASE | re.MULTILINE
    ),
    re.compile(
        rf"\banswer\b(?:\s(?:to|of|for)\b[^\n.:=]{{0,60}}?)?{_SAYS}|{_HEADING}answer[ \t*_]{{0,6}}$",
        re.IGNORECASE | re.MULTILINE,
    ),
)
_LEAD = re.compile(
    r"(?:[\s*_:=#>]|\b(?:is|are|be|should|must|would|to|the|this|question|problem|number|value|therefore|thus|so)\b"
    r"(?!\())*",
    re.IGNORECASE,
)
_CLOSING = re.compile(r"\b(?:is|are|equals|was|be|get|gives|obtain|have)\b|=", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.;!?](?:\s|$)|,\s|\*\*|\b(?:because|since|as|for|which|where)\b")
_SET_OFF = (r"\*\*([^*]{1,200})\*\*", r"\$([^$]{1,500})\$", r"\\\(([^()]{1,500}?)\\\)")
_PIECE = re.compile(
    r"\\(?:text\w*|mathrm|mathbf|operatorname|mbox|begin|end)\s{0,3}\{[^{}]*\}|\\[a-zA-Z]+|\\.|\*\*|\d[\d,.]*\d|\d"
    r"|[A-Za-z]+|\s+|.",
    re.DOTALL,
)
_NOTATION = frozenset("+-*/^_=<>|!%(){}[],:;.$&'−–×÷·√π∞≤≥≠±°²³½¼¾∪∩∈∅≈…θαβλμφωσ€£")
_WORDS = FUNCTIONS | INFINITY | PERCENT | DEGREE | UNITS | POWER_WORDS | {"and", "or", "pi", "per"}
_SHORT_PROSE = words("am an as at be by do go he if in is it me my no of on so to up us we")


def final_answer(response: str) -> FinalAnswer:
    """The text that the response gives as its final answer."""
    text = _CONTROL_TOKEN.sub(" ", response.rpartition("</think>")[2])
    if _BOX.search(text):
        return _boxed(text)
    for marker in _MARKERS:
        match = _last(marker.finditer(text))
        if match is not None:
            tail = text[match.end() : match.end() + MAX_TAIL].partition("</answer>")[0]
            found = _notation(_LEAD.sub("", tail, count=1))
            return FinalAnswer(found) if found else FinalAnswer(None, "nothing follows the word answer")
    return _last_line(text)


def plain_reference(reference: str) -> str:
    """A reference without the box or the worked solution around it."""
    text = reference.rpartition("####")[2].strip()
    return (_boxed(text).text or "") if _BOX.search(text) else text


def _last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    match = None
    for match in matches:  # noqa: B007
        pass
    return match


# boxes ----------------------------------------------------------------------------------------------------------


def _boxed(text: str) -> FinalAnswer:
    boxes = _outermost_boxes(text)
    _, end, content = boxes[-1]
    if content is None:
        return FinalAnswer(None, "the last box is not closed")
    if not content.strip():
        return FinalAnswer(None, "the last box is empty")
    contents = [content + _unit_after(text, end)]
    for (_, box_end, box_content), (next_start, _, _) in reversed(list(pairwise(boxes))):
        between = text[box_end:next_start]
        if not box_content or len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
            break
        contents.append(box_content)
    return FinalAnswer(", ".join(dict.fromkeys(each.strip() for each in reversed(contents))))


def _outermost_boxes(text: str) -> list[tuple[int, int, str | None]]:
    """Start, end and content of each box; the content of an unclosed one is None."""
    closing = _closing_braces(text)
    boxes: list[tuple[int, int, str | None]] = []
    for match in _BOX.finditer(text):
        if boxes and match.start() < boxes[-1][1]:
            continue
        at = match.end()
        if text.startswith("{", at):
            end = closing.get(at, len(text))
            boxes.append((match.start(), end + 1, text[at + 1 : end] if at in closing else None))
        else:  # \boxed 5 takes what TeX would, or its whole number
            bare = _UNBRACED.match(text, at)
            boxes.append((match.start(), bare.end() if bare else at, bare.group() if bare else ""))
    return boxes


def _closing_braces(text: str) -> dict[int, int]:
    """Where the brace that opens at each place closes."""
    closing: dict[int, int] = {}
    open_at: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            open_at.append(match.start())
        elif match.group() == "}" and open_at:
            closing[open_at.pop()] = match.start()
    return closing


def _unit_after(text: str, at: int) -> str:
    """The % sign, degree sign or unit that follows a box, as in `$\\boxed{35}$ pct`."""
    match = _AFTER_BOX.match(text, at)
    if match is None:
        return ""
    sign, upright, word = match.groups()
    if sign:
        return sign
    known = upright in UNITS or (word is not None and word in (UNITS | PERCENT | DEGREE) - _SHORT_PROSE)
    return rf" \text{{{upright or word}}}" if known else ""


# prose ----------------------------------------------------------------------------------------------------------


def _notation(text: str) -> str:
    """The notation at the start of the text, or, where words stand there, the words up to the end of their clause."""
    line = next((each for each in text.splitlines() if each.strip(" \t*_$#")), "").strip(" \t*_")
    taken, whole = _leading_notation(line)
    if not taken.strip(" $*_,.()"):
        return _CLAUSE_END.split(line, maxsplit=1)[0].strip(" $*_")
    return taken if whole else re.sub(r"(?<=\S)\s+[aAI]$", "", taken).rstrip()  # "5 a day": an article is no symbol


def _leading_notation(line: str) -> tuple[str, bool]:
    """As much of the line as is notation, and whether that is the whole line."""
    at = 0
    while (match := _PIECE.match(line, at)) and not _is_prose(match, line):
        at = match.end()
    return _trimmed(line[:at]), not line[at:].strip(" .*_$;")


def _is_prose(match: re.Match[str], line: str) -> bool:
    piece, following = match.group(), line[match.end() : match.end() + 1]
    if piece == "**":
        return match.start() > 0 and not re.match(r"[\w(\\-]", following)  # bold ends; 2**3 goes on
    if piece in ".;":
        return following in ("", " ", "*", "$")
    if piece.isalpha() and piece.isascii() and len(piece) > 1:
        attached = match.start() > 0 and not line[match.start() - 1].isspace()
        return not attached and piece.lower() not in _WORDS and not _is_product(piece)
    return len(piece) == 1 and not piece.isalnum() and not piece.isspace() and piece not in _NOTATION


def _is_product(word: str) -> bool:
    if len(word) == 2:
        return word.lower() not in _SHORT_PROSE
    return len(word) == 3 and not set(word.lower()) & set("aeiou")


def _trimmed(text: str) -> str:
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"(?:\b(?:and|or)|[,;:=*_])$", "", text.rstrip())
    return text.lstrip(" \t*_=").rstrip(" .")


def _last_line(text: str) -> FinalAnswer:
    line = next((each for each in reversed(text.splitlines()) if each.strip()), "").strip()[-MAX_TAIL:]
    taken, whole = _leading_notation(line.strip(" *_"))
    if whole and taken:
        return FinalAnswer(taken)
    if "\n" not in text.strip() and len(line.split()) <= 4 and re.fullmatch(r"[\w \-'().]+", line):
        return FinalAnswer(line.rstrip("."))  # nothing but a few words: Yes, Alice and Bob
    for pattern in _SET_OFF:
        if found := re.findall(pattern, line):
            return FinalAnswer(found[-1].strip(" $."))
    match = _last(_CLOSING.finditer(line))
    if match is not None:
        taken, whole = _leading_notation(line[match.end() :].strip(" *_"))
        if whole and taken:
            return FinalAnswer(taken)
    return FinalAnswer(None, "the response gives no final answer")
