"""Stop strings: finds the first one in text that comes in pieces, and holds back what may become one.

    text so far   ... out ... | held |        held: the longest end of the text that begins a stop string

The match that is complete first wins, and of those that are complete with the same character the longest. So
the result does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from runtime.text.automaton import Automaton


@lru_cache(maxsize=64)
def automaton_of(stops: tuple[str, ...]) -> Automaton[str]:
    """Return the automaton of these stop strings. It is cached, because the sequences of one request, and
    often of many, have the same ones.
    """
    return Automaton(stops)


class StopStringMatcher:
    """Finds stop strings in the text of one sequence. Characters that begin no stop string cost nothing."""

    __slots__ = ("_automaton", "_first_characters", "_held", "_include", "_state")

    def __init__(self, stops: Sequence[str], *, include_match: bool) -> None:
        """Look for `stops`, none of them empty. include_match: True if the matched string stays in
        the text.
        """
        self._automaton = automaton_of(tuple(stops))
        self._first_characters = self._automaton.first_symbols
        self._include = include_match
        self._held = ""
        self._state = 0
        """Automaton state, which represents the text that is held back."""

    def concerns(self, piece: str) -> bool:
        """Return False for text that can be passed on as it is, without a `push`."""
        return bool(self._held) or not self._first_characters.isdisjoint(piece)

    def push(self, piece: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Process the next piece of text. Returns (text that may be sent, the stop string that it completed
        or None). With `may_match` False no stop string ends in this piece, though one may begin. Push nothing
        after a match.
        """
        if not self.concerns(piece):
            return piece, None
        automaton = self._automaton
        text = self._held + piece
        state, num_read, match_len = automaton.scan(self._state, piece, until_match=may_match)
        if match_len:
            end = len(self._held) + num_read
            start = end - match_len
            self.flush()
            return text[: end if self._include else start], text[start:end]
        if not state:
            self.flush()
            return text, None
        self._state = state = automaton.pending(state)
        num_out = len(text) - automaton.depth(state)
        self._held = text[num_out:]
        return text[:num_out], None

    def push_end(self, piece: str, *, may_match: bool) -> tuple[str, str | None]:
        """Process the last piece of text. Like `push`, but nothing is held back."""
        text, matched = self.push(piece, may_match=may_match)
        return text + self.flush(), matched

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        held, self._held, self._state = self._held, "", 0
        return held
