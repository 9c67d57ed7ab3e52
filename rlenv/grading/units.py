"""Unit words go in, a `Unit` comes out that compares equal to its synonyms and converts to its relatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

Unit = tuple[tuple[str, int], ...]  # (name, power), sorted by name

_DIMENSIONS: dict[str, dict[str, tuple[Fraction, str]]] = {
    "length": {
        "m": (Fraction(1), "meter metre meters metres"),
        "cm": (Fraction(1, 100), "centimeter centimetre centimeters centimetres"),
        "mm": (Fraction(1, 1000), "millimeter millimetre millimeters millimetres"),
        "km": (Fraction(1000), "kilometer kilometre kilometers kilometres"),
        "in": (Fraction(254, 10_000), "inch inches"),
        "ft": (Fraction(3048, 10_000), "foot feet"),
        "yd": (Fraction(9144, 10_000), "yard yards"),
        "mi": (Fraction(1_609_344, 1000), "mile miles"),
    },
    "mass": {
        "g": (Fraction(1), "gram grams"),
        "kg": (Fraction(1000), "kilogram kilograms"),
        "mg": (Fraction(1, 1000), "milligram milligrams"),
        "lb": (Fraction(45_359_237, 100_000), "lbs pound pounds"),
    },
    "time": {
        "s": (Fraction(1), "sec secs second seconds"),
        "min": (Fraction(60), "mins minute minutes"),
        "h": (Fraction(3600), "hr hrs hour hours"),
        "day": (Fraction(86_400), "days"),
        "week": (Fraction(604_800), "weeks"),
    },
    "volume": {
        "l": (Fraction(1), "L liter litre liters litres"),
        "ml": (Fraction(1, 1000), "mL milliliter millilitre milliliters millilitres"),
    },
    "forenoon": {"am": (Fraction(1), "")},
    "afternoon": {"pm": (Fraction(1), "")},
    "money": {
        "dollar": (Fraction(1), "dollars usd"),
        "cent": (Fraction(1, 100), "cents"),
    },
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_KNOWN = {name: (dimension, factor) for dimension, row in _DIMENSIONS.items() for name, (factor, _) in row.items()}
_NAME = {
    spelling: name
    for row in _DIMENSIONS.values()
    for name, (_, spellings) in row.items()
    for spelling in (name, *spellings.split())
}
UNITS = frozenset(_NAME)  # every spelling of a known unit
POWER_WORDS = frozenset(_POWERS)


def unit_of(words: Iterable[str]) -> Unit | None:
    """`["square", "metres"]` → (("m", 2),); `["km", "/", "h"]` → (("h", -1), ("km", 1)); unknown words stay."""
    powers: Counter[str] = Counter()
    name, sign, pending = "", 1, 1
    for word in words:
        if word.startswith("^"):
            powers[name] += sign * (int(word[1:3]) - 1)
        elif word in ("/", "per"):
            sign = -1
        elif word.lower() in _POWERS:
            if word.lower().endswith("d") and name:
                powers[name] += sign * (_POWERS[word.lower()] - 1)
            else:
                pending = _POWERS[word.lower()]
        else:
            name = _NAME.get(word) or _NAME.get(word.lower()) or word.lower().removesuffix("s")
            powers[name] += sign * pending
            pending = 1
    return tuple(sorted((name, power) for name, power in powers.items() if power)) or None


def conversion(unit: Unit, other: Unit) -> Fraction | None:
    """How many of `other` one of `unit` is; None where they measure different things."""
    if unit == other:
        return Fraction(1)
    mine, theirs = _measure(unit), _measure(other)
    if mine is None or theirs is None or mine[0] != theirs[0]:
        return None
    return mine[1] / theirs[1]


def _measure(unit: Unit) -> tuple[dict[str, int], Fraction] | None:
    dimensions: Counter[str] = Counter()
    factor = Fraction(1)
    for name, power in unit:
        if name not in _KNOWN or abs(power) > 9:
            return None
        dimension, size = _KNOWN[name]
        dimensions[dimension] += power
        factor *= size**power
    return {dimension: power for dimension, power in dimensions.items() if power}, factor
