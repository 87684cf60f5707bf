"""JSON numbers within bounds, as nodes of a grammar.

With bounds, numbers have no exponent, and zero has no sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from grammar_proc.xgrammar_backend.nodes import (
    EMPTY,
    NEVER,
    FixedText,
    GrammarNode,
    Repeated,
    Rules,
    alt,
    chars,
    literals,
    many,
    maybe,
    points,
    seq,
    some,
)

MAX_MULTIPLES = 10_000
"""Maximum number of multiples that are listed."""
MAX_DIVISOR = 100
"""Largest divisor of numbers without a bound, because each remainder needs a rule."""
MAX_DIGITS = 320


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number; None: no bound."""

    least: Fraction | None = None
    most: Fraction | None = None
    is_above: bool = False
    """True if the least itself is excluded."""
    is_below: bool = False
    """True if the most itself is excluded."""

    def narrowed(self, keyword: str, value: float) -> Bounds:
        """Return these bounds, narrowed by a keyword."""
        bound = exact(value)
        if keyword in ("minimum", "exclusiveMinimum"):
            is_open = keyword == "exclusiveMinimum"
            if self.least is None or bound > self.least:
                return replace(self, least=bound, is_above=is_open)
            return replace(self, is_above=self.is_above or is_open) if bound == self.least else self
        is_open = keyword == "exclusiveMaximum"
        if self.most is None or bound < self.most:
            return replace(self, most=bound, is_below=is_open)
        return replace(self, is_below=self.is_below or is_open) if bound == self.most else self

    def mirrored(self) -> Bounds:
        return Bounds(
            None if self.most is None else -self.most,
            None if self.least is None else -self.least,
            self.is_below,
            self.is_above,
        )


def exact(value: float) -> Fraction:
    """Return the exact value of a number as it is written in decimal."""
    return Fraction(repr(value))


def _digit(low: int = 0, high: int = 9) -> GrammarNode:
    return chars([(0x30 + low, 0x30 + high)]) if low <= high else NEVER


DIGIT = _digit()
INTEGER = seq(maybe(FixedText("-")), alt([FixedText("0"), seq(_digit(1), many(DIGIT))]))
EXPONENT = seq(chars(points("eE")), maybe(chars(points("+-"))), Repeated(DIGIT, 1, 2))
FRACTION = seq(FixedText("."), some(DIGIT))
NUMBER = seq(INTEGER, maybe(FRACTION), maybe(EXPONENT))


# -- integers ------------------------------------------------------------------------------------------------


def integers(bounds: Bounds) -> GrammarNode:
    least, most = _whole(bounds)
    if least is None and most is None:
        return INTEGER
    below = None if most is None else -most
    return alt(
        [
            _naturals(max(least or 0, 0), most) if most is None or most >= 0 else NEVER,
            seq(FixedText("-"), _naturals(max(below or 1, 1), None if least is None else -least))
            if least is None or least < 0
            else NEVER,
        ]
    )


def _whole(bounds: Bounds) -> tuple[int | None, int | None]:
    """Return the least and the most integer within bounds; None: no bound."""
    least = most = None
    if bounds.least is not None:
        least = math.ceil(bounds.least)
        least += bounds.is_above and least == bounds.least
    if bounds.most is not None:
        most = math.floor(bounds.most)
        most -= bounds.is_below and most == bounds.most
    return least, most


def _naturals(least: int, most: int | None) -> GrammarNode:
    """Return the integers from `least` to `most`; None: without end."""
    if most is not None and least > most:
        return NEVER
    low, high = str(least), "" if most is None else str(most)
    if max(len(low), len(high)) > MAX_DIGITS:
        raise ValueError(f"a bound has more than {MAX_DIGITS} digits")
    if len(low) == len(high):
        return _between(low, high)
    nodes = [_from(low)]
    longer = len(low)
    if most is None:
        nodes.append(seq(_digit(1), Repeated(DIGIT, longer, None)))
    else:
        if len(high) - 1 > longer:
            nodes.append(seq(_digit(1), Repeated(DIGIT, longer, len(high) - 2)))
        nodes.append(_between("1" + "0" * (len(high) - 1), high))
    return alt(nodes)


def _any(count: int) -> GrammarNode:
    return Repeated(DIGIT, count, count) if count else EMPTY


def _from(low: str) -> GrammarNode:
    """Return digit strings of the same length that are not less."""
    if not low:
        return EMPTY
    first = int(low[0])
    return alt([seq(FixedText(low[0]), _from(low[1:])), *_more(first + 1, 9, len(low) - 1)])


def _up_to(high: str) -> GrammarNode:
    if not high:
        return EMPTY
    first = int(high[0])
    return alt([*_more(0, first - 1, len(high) - 1), seq(FixedText(high[0]), _up_to(high[1:]))])


def _between(low: str, high: str) -> GrammarNode:
    if not low:
        return EMPTY
    first, last = int(low[0]), int(high[0])
    if first == last:
        return seq(FixedText(low[0]), _between(low[1:], high[1:]))
    return alt(
        [
            seq(FixedText(low[0]), _from(low[1:])),
            *_more(first + 1, last - 1, len(low) - 1),
            seq(FixedText(high[0]), _up_to(high[1:])),
        ]
    )


def _more(low: int, high: int, num_behind: int) -> list[GrammarNode]:
    return [seq(_digit(low, high), _any(num_behind))] if low <= high else []


# -- other numbers -------------------------------------------------------------------------------------------


def numbers(bounds: Bounds) -> GrammarNode:
    """Return the numbers within bounds, with or without a fraction."""
    if bounds.least is None and bounds.most is None:
        return NUMBER
    nodes = []
    if bounds.most is None or bounds.most >= 0:
        is_cut = bounds.least is None or bounds.least < 0
        nodes.append(_positive(replace(bounds, least=Fraction(0), is_above=False) if is_cut else bounds))
    if bounds.least is None or bounds.least < 0:
        below = bounds.mirrored()
        if below.least is None or below.least <= 0:
            below = replace(below, least=Fraction(0), is_above=True)
        nodes.append(seq(FixedText("-"), _positive(below)))
    return alt(nodes)


def _positive(bounds: Bounds) -> GrammarNode:
    """Return the numbers within bounds of which the lower one exists and is not negative."""
    assert bounds.least is not None
    low, low_digits = _split(bounds.least)
    if bounds.most is None:
        return alt(
            [
                seq(FixedText(str(low)), _fraction_from(low_digits, bounds.is_above)),
                seq(_naturals(low + 1, None), maybe(FRACTION)),
            ]
        )
    high, high_digits = _split(bounds.most)
    if low > high:
        return NEVER
    if low == high:
        return seq(FixedText(str(low)), _fraction_between(low_digits, high_digits, bounds))
    return alt(
        [
            seq(FixedText(str(low)), _fraction_from(low_digits, bounds.is_above)),
            seq(_naturals(low + 1, high - 1), maybe(FRACTION)),
            seq(FixedText(str(high)), _fraction_up_to(high_digits, bounds.is_below)),
        ]
    )


def _split(value: Fraction) -> tuple[int, str]:
    """Return the whole part of a value, and the digits after the decimal point."""
    whole, digits = int(value), ""
    rest = value - whole
    while rest:
        rest *= 10
        digits += str(int(rest))
        rest -= int(rest)
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"a bound has more than {MAX_DIGITS} digits")
    return whole, digits


def _fraction_from(low: str, is_above: bool) -> GrammarNode:
    if low:
        return seq(FixedText("."), _digits_from(low, is_above))
    return seq(FixedText("."), _above_zero()) if is_above else maybe(FRACTION)


def _above_zero() -> GrammarNode:
    return seq(many(DIGIT), _digit(1), many(DIGIT))


def _digits_from(low: str, is_above: bool) -> GrammarNode:
    if not low:
        return _above_zero() if is_above else many(DIGIT)
    first = int(low[0])
    higher = [seq(_digit(first + 1), many(DIGIT))] if first < 9 else []
    return alt([seq(FixedText(low[0]), _digits_from(low[1:], is_above)), *higher])


def _fraction_up_to(high: str, is_below: bool) -> GrammarNode:
    if high:
        return maybe(seq(FixedText("."), _digits_up_to(high, is_below)))
    return NEVER if is_below else maybe(seq(FixedText("."), some(FixedText("0"))))


def _digits_up_to(high: str, is_below: bool) -> GrammarNode:
    """Return digits after the point up to `high`, which is not empty and does not end with 0."""
    first = int(high[0])
    lower = [seq(_digit(0, first - 1), many(DIGIT))] if first else []
    if len(high) == 1:
        equal = NEVER if is_below else seq(FixedText(high), many(FixedText("0")))
    else:
        equal = seq(FixedText(high[0]), maybe(_digits_up_to(high[1:], is_below)))
    return alt([*lower, equal])


def _fraction_between(low: str, high: str, bounds: Bounds) -> GrammarNode:
    if not low and not high:
        return (
            NEVER if bounds.is_above or bounds.is_below else maybe(seq(FixedText("."), some(FixedText("0"))))
        )
    width = max(len(low), len(high))
    node = seq(FixedText("."), _digits_between(low.ljust(width, "0"), high.ljust(width, "0"), bounds))
    return node if low or bounds.is_above else maybe(node)


def _digits_between(low: str, high: str, bounds: Bounds) -> GrammarNode:
    if not low:
        return NEVER if bounds.is_above or bounds.is_below else many(FixedText("0"))
    first, last = int(low[0]), int(high[0])
    if first > last:
        return NEVER
    if first == last:
        return seq(FixedText(low[0]), _digits_between(low[1:], high[1:], bounds))
    below = high[1:].rstrip("0")
    at_most = (
        _digits_up_to(below, bounds.is_below)
        if below
        else (NEVER if bounds.is_below else many(FixedText("0")))
    )
    nodes = [
        seq(FixedText(low[0]), _digits_from(low[1:].rstrip("0"), bounds.is_above)),
        seq(_digit(first + 1, last - 1), many(DIGIT)) if first + 1 < last else NEVER,
        seq(FixedText(high[0]), maybe(at_most) if below else at_most),
    ]
    return alt(nodes)


# -- multiples -----------------------------------------------------------------------------------------------


def multiples(of: Fraction, bounds: Bounds, rules: Rules, *, is_integer: bool) -> GrammarNode | None:
    """Return the multiples of a number within bounds; None if there are too many to write them."""
    if bounds.least is not None and bounds.most is not None:
        first, last = math.ceil(bounds.least / of), math.floor(bounds.most / of)
        if last - first >= MAX_MULTIPLES:
            return None
        first += bounds.is_above and first * of == bounds.least
        last -= bounds.is_below and last * of == bounds.most
        values = [number * of for number in range(first, last + 1)]
        texts = [_decimal(value) for value in values if not is_integer or value.denominator == 1]
        return literals(texts, rules) if texts else NEVER
    divisor = of.numerator  # divisor of the multiples that are integers, and of all if `of` is one
    if (of.denominator > 1 and not is_integer) or divisor > MAX_DIVISOR:
        return None
    positive = _divisible(divisor, rules)
    if bounds == Bounds():
        return alt([FixedText("0"), seq(maybe(FixedText("-")), positive)])
    if bounds.most is None and bounds.least is not None and 0 <= bounds.least < divisor:
        has_zero = bounds.least == 0 and not bounds.is_above
        return alt([FixedText("0") if has_zero else NEVER, positive])
    return None


def _divisible(divisor: int, rules: Rules) -> GrammarNode:
    """Return the positive multiples of a divisor, with one rule for each remainder of the digits so far."""
    states = [rules.new() for _ in range(divisor)]

    def behind(remainder: int, low: int) -> GrammarNode:
        return alt(
            seq(FixedText(str(digit)), states[(10 * remainder + digit) % divisor]) for digit in range(low, 10)
        )

    for remainder, state in enumerate(states):
        rules.put(state, alt([EMPTY, behind(remainder, 0)] if remainder == 0 else [behind(remainder, 0)]))
    return behind(0, 1)


def _decimal(value: Fraction) -> str:
    whole, digits = _split(abs(value))
    return f"{'-' if value < 0 else ''}{whole}{'.' if digits else ''}{digits}"
