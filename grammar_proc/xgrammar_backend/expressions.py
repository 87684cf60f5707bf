"""Regular expressions of Rust's `regex`, as nodes of a grammar.

Classes like `\\d` contain ASCII characters only, and so do `\\D` and its kind. So the output matches both
with Unicode's classes and without. Features that a grammar cannot express are refused: look-around,
back-references, word boundaries, flags, and anchors within.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from grammar_proc.xgrammar_backend.nodes import (
    EMPTY,
    MAX_CODE,
    GrammarNode,
    Ranges,
    Repeated,
    alt,
    complement,
    merged,
    points,
    seq,
    without,
)

OfChars: TypeAlias = Callable[[Ranges], GrammarNode]
"""Function that makes a node of one character from a set."""
Length: TypeAlias = tuple[int, int | None]
"""Least and most characters; None: any number."""
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0A), (0x0C, 0x0D), (0x20, 0x20))
MAYBE_SPACE: Ranges = ((0x0B, 0x0B), (0x1C, 0x1F))
"""Characters that only some regular expression engines count as white space."""
ASCII: Ranges = ((0x00, 0x7F),)
CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE}
LINE_BREAK = points("\n")
CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
HEX_DIGITS = {"x": 2, "u": 4}
MAX_COUNT = 65_535
MAX_DEPTH = 100


class ExpressionRefused(ValueError):
    """Raised for an expression that is wrong, or that a grammar cannot express."""


class Expression:
    """A parsed regular expression.

    length: least and most characters of a match.
    """

    def __init__(self, text: str, of_chars: OfChars) -> None:
        """Parse the expression. Raises ExpressionRefused."""
        self._text = text
        self._at = 0
        self._depth = 0
        self._of_chars = of_chars
        self._branches: list[tuple[bool, GrammarNode, bool]] = []
        """Alternatives: anchored at the start, node, anchored at the end."""
        lengths: list[Length] = []
        while not lengths or self._takes("|"):
            begins = self._takes("^")
            node, length, ends = self._series(is_outermost=True)
            self._branches.append((begins, node, ends))
            lengths.append(length)
        if self._at < len(text):
            self._refuse("unopened group")
        self.length = _either(lengths)

    def whole(self) -> GrammarNode:
        """Return the texts that match from beginning to end."""
        return alt(node for _, node, _ in self._branches)

    def found(self, anything: GrammarNode) -> GrammarNode:
        """Return the texts that contain a match. `anything` matches any text."""
        return alt(
            seq(EMPTY if begins else anything, node, EMPTY if ends else anything)
            for begins, node, ends in self._branches
        )

    # -- reading --------------------------------------------------------------------------------------------

    def _alternatives(self) -> tuple[GrammarNode, Length]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(f"groups are nested more than {MAX_DEPTH} deep")
        nodes: list[GrammarNode] = []
        lengths: list[Length] = []
        while not nodes or self._takes("|"):
            node, length, _ = self._series(is_outermost=False)
            nodes.append(node)
            lengths.append(length)
        self._depth -= 1
        return alt(nodes), _either(lengths)

    def _series(self, *, is_outermost: bool) -> tuple[GrammarNode, Length, bool]:
        nodes: list[GrammarNode] = []
        least, most, ends = 0, 0, False
        most_: int | None = most
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if ends:
                self._refuse("an anchor within an expression")
            if is_outermost and self._takes("$"):
                ends = True
                continue
            node, (low, high) = self._repeated(*self._atom())
            nodes.append(node)
            least += low
            most_ = None if most_ is None or high is None else most_ + high
        return seq(*nodes), (least, most_), ends

    def _repeated(self, node: GrammarNode, length: Length) -> tuple[GrammarNode, Length]:
        num_repeats = 0
        while (bounds := self._bounds()) is not None:
            num_repeats += 1
            if num_repeats > MAX_DEPTH:
                self._refuse("too many repetitions of repetitions")
            least, most = bounds
            self._takes("?")  # a lazy repetition matches the same texts
            if self._text[self._at : self._at + 1] == "+":
                self._refuse("possessive repetition is not supported")
            node = Repeated(node, least, most)
            longest = 0 if most == 0 or length[1] == 0 else None
            if most is not None and length[1] is not None:
                longest = length[1] * most
            length = (length[0] * least, longest)
        return node, length

    def _bounds(self) -> Length | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return bounds
        if not self._takes("{"):
            return None
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : end].replace(" ", "").partition(",")
        numbers_only = low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))
        if end < 0 or not numbers_only:
            self._refuse("a repetition is {n}, {n,} or {n,m}")
        self._at = end + 1
        least = int(low)
        most = int(high) if high else None if comma else least
        if max(least, most or 0) > MAX_COUNT:
            self._refuse(f"at most {MAX_COUNT} repetitions are supported")
        if most is not None and most < least:
            self._refuse("a repetition whose bounds are the wrong way round")
        return least, most

    def _atom(self) -> tuple[GrammarNode, Length]:
        char = self._next()
        one: Length = (1, 1)
        match char:
            case "(":
                return self._group()
            case "[":
                return self._of_chars(self._set()), one
            case ".":
                return self._of_chars(complement(LINE_BREAK)), one
            case "\\":
                return self._of_chars(self._escape(in_set=False)), one
            case "^" | "$":
                self._refuse("an anchor within an expression")
            case "*" | "+" | "?" | "{":
                self._refuse("there is nothing to repeat")
        return self._of_chars(points(char)), one

    def _group(self) -> tuple[GrammarNode, Length]:
        if self._takes("?"):
            if self._takes("=", "!", "<=", "<!"):
                self._refuse("look-around, including look-ahead and look-behind, is not supported")
            if self._takes("P<", "<"):
                end = self._text.find(">", self._at)
                if not self._text[self._at : end].isidentifier():
                    self._refuse("a group's name is wrong")
                self._at = end + 1
            elif self._takes("P="):
                self._refuse("backreferences are not supported")
            elif not self._takes(":"):
                self._refuse("flags are not supported")
        made = self._alternatives()
        if not self._takes(")"):
            self._refuse("unclosed group")
        return made

    def _set(self) -> Ranges:
        is_negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        is_first, has_class = True, False
        while is_first or not self._takes("]"):
            if self._at >= len(self._text):
                self._refuse("unclosed set of characters")
            if self._takes("[", "&&", "--", "~~"):
                self._refuse("sets within a set of characters are not supported; write \\[ for a bracket")
            has_class = has_class or self._text[self._at : self._at + 2] in ("\\d", "\\w", "\\s")
            low = self._member()
            is_first = False
            is_single = len(low) == 1 and low[0][0] == low[0][1]
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in (
                "]",
                "",
            ):
                self._at += 1
                high = self._member()
                if not is_single or len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    self._refuse("a range of characters whose bounds are wrong")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        if is_negated and has_class:
            return without(ASCII, [*ranges, *MAYBE_SPACE])
        return complement(ranges) if is_negated else merged(ranges)

    def _member(self) -> Ranges:
        char = self._next()
        return self._escape(in_set=True) if char == "\\" else points(char)

    def _escape(self, *, in_set: bool) -> Ranges:
        char = self._next()
        if char in CLASSES:
            return CLASSES[char]
        if char.lower() in CLASSES:
            # Within a set it may be negated again, so only where it says the same to all.
            if in_set:
                self._refuse(f"\\{char} within a set of characters is not supported")
            return without(ASCII, [*CLASSES[char.lower()], *MAYBE_SPACE])
        if char in CONTROLS:
            return points(chr(CONTROLS[char]))
        if char in HEX_DIGITS:
            return self._code(HEX_DIGITS[char])
        if char == "0" or not char.isalnum():
            return points("\0" if char == "0" else char)
        if char in "bB" or char in "AzZ":
            self._refuse("word boundaries and other anchors are not supported")
        if char.isdigit() or char == "k":
            self._refuse("backreferences are not supported")
        return self._refuse(f"\\{char} is not supported")

    def _code(self, num_digits: int) -> Ranges:
        if self._takes("{"):
            end = self._text.find("}", self._at)
            digits, self._at = self._text[self._at : end], end + 1
        else:
            digits = self._text[self._at : self._at + num_digits]
            self._at += num_digits
            if len(digits) < num_digits:
                self._refuse("a character's code has too few digits")
        try:
            code = int(digits, 16)
        except ValueError:
            self._refuse("a character's code is wrong")
        if not 0 <= code <= MAX_CODE:
            self._refuse("a character's code is too large")
        return ((code, code),)

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._refuse("it ends within an escape or a set of characters")
        self._at += 1
        return self._text[self._at - 1]

    def _takes(self, *signs: str) -> bool:
        """Move past the first of the given signs that comes next. Returns False if none does."""
        for sign in signs:
            if self._text.startswith(sign, self._at):
                self._at += len(sign)
                return True
        return False

    def _refuse(self, why: str) -> NoReturn:
        raise ExpressionRefused(f"at position {self._at}: {why}")


def _either(lengths: Sequence[Length]) -> Length:
    longest = [most for _, most in lengths]
    numbers = [most for most in longest if most is not None]
    return min(least for least, _ in lengths), max(numbers) if len(numbers) == len(longest) else None
