"""SpecialText: special tokens that callers have spelled, marked so that they can be told from the template's.

Only the first character of a spelling is marked: it is written as two private-use characters, which no
template takes for anything else and which the encoder (runtime.text.plain_encoder) reads as that character
again, when the special tokens of the template have been found. Knows spellings, not ids.

A spelling may also come about where a caller's text meets the template's or another caller's. So marked are,
too, the first character of what may begin one at the end of a text, and the last one of what may end one at
its beginning. When nothing has come of it, the marks are taken out again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from runtime.base.errors import InvalidRequest

ESCAPE = "\U0010fffd"
FIRST_LETTER = 0x10FF00
PIECE_CHARS = 1 << 15
"""Number of characters that are searched at once, which takes 3 ms for the worst text."""
SPACES = " \u2581"
"""Characters that normalizers put before a text, or write for a space in it."""
Trie: TypeAlias = "dict[str, Trie]"

_ESCAPE = re.compile(ESCAPE)


class ShieldedText(str):
    """Prompt of a conversation in which callers' special tokens are marked."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Shielded:
    """Input of a chat template with special tokens marked."""

    messages: Sequence[Mapping[str, object]]
    variables: Mapping[str, object]
    has_others: bool
    """True if there are special tokens that only the tokenizer's normalizer forms from other characters."""


class SpecialText:
    def __init__(self, spellings: Iterable[str]) -> None:
        """spellings: special tokens to look for. Case is ignored, because a template may change it."""
        forms = {spelling.lower() for spelling in spellings if spelling}
        firsts, lasts = _cases(form[0] for form in forms), _cases(form[-1] for form in forms)
        chars = [*sorted(firsts | lasts), ESCAPE]
        # A caller's own ESCAPE is marked, too, and read last, so that no text after it is taken for a mark.
        self.marks = {char: ESCAPE + chr(FIRST_LETTER + n) for n, char in enumerate(chars)}
        """Mark of each character, in the order in which marks must be read."""
        self._starts = re.compile(_starts_pattern(forms), re.IGNORECASE)
        self._any_first, self._any_last, self._any_end = map(_one_of, (firsts, lasts, firsts | lasts))
        # Parts that consist of letters alone are not marked, because templates compare such texts, as in
        # role == "user".
        prefixes = {form[:end] for form in forms for end in range(1, len(form))}
        suffixes = {form[start:] for form in forms for start in range(1, len(form))}
        self._prefixes = {part for part in prefixes if not part.isalnum()}
        self._suffixes = {part for part in suffixes if not part.isalnum()}
        self._max_part = max(map(len, forms), default=1) - 1

    def is_in(self, text: str) -> bool:
        """Return True if `text` contains a spelling, or one may be formed at one of its ends."""
        if len(text) <= PIECE_CHARS and self._any_end.search(text) is None:
            return False
        return next(self._found(text), None) is not None or next(self._edges(text), None) is not None

    def count(self, text: str) -> int:
        """Return the number of spellings in `text`."""
        return sum(1 for _ in self._found(text))

    def shield(self, text: str) -> str:
        """Mark the spellings in `text`, and parts of spellings at its ends."""
        edges = set(self._edges(text))
        shielded = []
        for start in range(0, len(text), PIECE_CHARS):
            stop = min(start + PIECE_CHARS, len(text))
            positions = {*self._found_between(text, start, stop), *edges.intersection(range(start, stop))}
            positions.update(match.start() for match in _ESCAPE.finditer(text, start, stop))
            pieces, end = [], start
            for position in sorted(positions):
                char = text[position]
                pieces += [text[end:position], self.marks.get(char, char)]
                end = position + 1
            shielded.append("".join([*pieces, text[end:stop]]))
        return "".join(shielded)

    def restore(self, text: str) -> str:
        """Undo `shield`."""
        for char, mark in self.marks.items():
            text = text.replace(mark, char)
        return text

    def _found(self, text: str) -> Iterator[int]:
        """Yield the positions of spellings. Other threads can run between pieces, but not during a search."""
        for start in range(0, len(text), PIECE_CHARS):
            yield from self._found_between(text, start, start + PIECE_CHARS)

    def _found_between(self, text: str, start: int, stop: int) -> Iterator[int]:
        for match in self._starts.finditer(text, start, stop + self._max_part):
            if match.start() < stop:
                yield match.start()

    def _edges(self, text: str) -> Iterator[int]:
        """Yield the positions of parts of spellings at the ends of a text. White space at the ends is
        ignored, since templates strip it.
        """
        end = len(text.rstrip())
        for match in self._any_first.finditer(text, max(0, end - self._max_part), end):
            if text[match.start() : end].lower() in self._prefixes:
                yield match.start()
        start = len(text) - len(text.lstrip())
        for match in self._any_last.finditer(text, start, start + self._max_part):
            if text[start : match.end()].lower() in self._suffixes:
                yield match.start()


class Shield:
    """Marks the special tokens in what callers give to a chat template."""

    def __init__(
        self,
        spellings: Sequence[str],
        normalized: Sequence[str] = (),
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        """normalized: spellings that the tokenizer matches in text after `normalize`."""
        self._special = SpecialText(spellings)
        self._normalize = normalize or str
        self._normalized: SpecialText | None = None
        if normalize is not None and normalized:
            self._normalized = SpecialText(normalize(each).strip(SPACES) for each in normalized)

    def apply(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> Shielded | None:
        """Return both arguments with all texts in them marked; None if no text can become a special token.
        Raises InvalidRequest for a value that JSON does not have.
        """
        given = [*(value for message in messages for value in message.values()), *variables.values()]
        texts = list(_texts(given))
        has_others = self._normalized is not None and any(map(self._is_other, texts))
        if not has_others and not any(map(self._special.is_in, texts)):
            return None
        shield = self._special.shield
        return Shielded(
            [{name: _map_texts(value, shield) for name, value in message.items()} for message in messages],
            {name: _map_texts(value, shield) for name, value in variables.items()},
            has_others,
        )

    def settle(self, prompt: str, shielded: Shielded) -> str:
        """Return `prompt`, which was made from `shielded`, without the marks if no special token
        was formed.
        """
        text = self._special.restore(prompt)
        if shielded.has_others or self._special.count(text) != self._special.count(prompt):
            return ShieldedText(prompt)
        return text

    def restore(self, text: str) -> str:
        """Return `text`, which may quote marked text, as the caller wrote it."""
        return self._special.restore(text)

    def _is_other(self, text: str) -> bool:
        assert self._normalized is not None
        normalized = self._normalize(text)
        if not self._normalized.is_in(normalized):
            return False
        return self._normalized.count(normalized) != self._special.count(text) or not self._special.is_in(
            text
        )


def _texts(given: object) -> Iterator[str]:
    """Yield all texts in nested lists and maps. Raises InvalidRequest for bytes and other types that a
    template could turn into text.
    """
    waiting = [given]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif not isinstance(value, int | float | None):
            raise InvalidRequest(
                f"chat_template_kwargs: a value is {type(value).__name__}; values are text, numbers, true, "
                "false, null, and lists and maps of these",
                param="chat_template_kwargs",
            )


def _map_texts(given: object, change: Callable[[str], str]) -> object:
    if isinstance(given, str):
        return change(given)
    if isinstance(given, Mapping):
        return {
            change(name) if isinstance(name, str) else name: _map_texts(value, change)
            for name, value in given.items()
        }
    if isinstance(given, list | tuple):
        return [_map_texts(value, change) for value in given]
    return given


def _cases(chars: Iterable[str]) -> set[str]:
    return {case for char in chars for case in (char, char.upper()) if len(case) == 1}


def _one_of(chars: set[str]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(''.join(sorted(chars)))}]" if chars else "(?!)")


def _starts_pattern(forms: set[str]) -> str:
    """Return a regular expression that matches the first character of any form. It compares each form only as
    far as it matches, so a text full of `<` costs no more than any other.
    """
    trie: Trie = {}
    for form in sorted(forms):
        if any(form[:end] in forms for end in range(1, len(form))):
            continue  # the shorter one, which was found, is its beginning
        node = trie
        for char in form:
            node = node.setdefault(char, {})
    heads = [re.escape(char) + (f"(?={_pattern_of(node)})" if node else "") for char, node in trie.items()]
    return "|".join(heads) or "(?!)"


def _pattern_of(node: Trie) -> str:
    literal = ""
    while len(node) == 1:
        ((char, node),) = node.items()
        literal += re.escape(char)
    if not node:
        return literal
    branches = "|".join(re.escape(char) + _pattern_of(child) for char, child in node.items())
    return f"{literal}(?:{branches})"
