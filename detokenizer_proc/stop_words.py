"""Stop words: finds the first sequence of token ids that ends a text, and holds back the text of what may
become one.

    text so far   ... out ... | held by words ... | held by strings |
                              ^ where the first token of the longest pending word begins

The word that is complete first wins, and of those that are complete with the same token the longest. A stop
string that is complete within the text of that token was complete before the word. The ids go out at once, as
they do with stop strings. A character that began before a word and is completed in it goes with the word.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from detokenizer_proc.stop_strings import StopStringMatcher
from runtime.text.automaton import Automaton
from runtime.wire.format import unpack_ids


@lru_cache(maxsize=64)
def automaton_of(words: tuple[bytes, ...]) -> Automaton[array[int]]:
    """Return the automaton of these words, given as packed ids. It is cached, because the sequences of one
    request, and often of many, have the same ones.
    """
    return Automaton([array("i", unpack_ids(word).tolist()) for word in words])


class StopWordMatcher:
    """Finds stop words in the ids of one sequence and, if it has any, stop strings in its text."""

    __slots__ = (
        "_automaton",
        "_held",
        "_include",
        "_num_chars",
        "_num_out",
        "_starts",
        "_state",
        "_strings",
        "_tokens",
        "_word_text",
    )

    def __init__(
        self,
        words: tuple[bytes, ...],
        *,
        include_match: bool,
        strings: StopStringMatcher | None,
        word_text: Callable[[Sequence[int]], str],
    ) -> None:
        """words: packed ids of each. include_match: True if the matched word stays in the text. word_text:
        returns the text of a word, which names the match.
        """
        self._automaton = automaton_of(words)
        self._include = include_match
        self._strings = strings
        self._word_text = word_text
        self._state = 0
        # For the last tokens, as many as a word can have: the place where the text of each begins, and their
        # ids.
        self._starts: deque[int] = deque(maxlen=self._automaton.max_len)
        self._tokens: deque[int] = deque(maxlen=self._automaton.max_len)
        self._num_chars = 0
        self._num_out = 0
        self._held = ""

    def push(self, token: int, piece: str, *, may_match: bool) -> tuple[str, str | None]:
        """Process one token and its text. Returns (text that may be sent, the stop string or the text of the
        stop word that it completed, or None). With `may_match` False nothing ends here, though it may begin.
        Push nothing after a match.
        """
        self._starts.append(self._num_chars)
        self._tokens.append(token)
        self._num_chars += len(piece)
        matched = self._push_text(piece, may_match)
        if matched is not None:
            return self.flush(), matched
        automaton = self._automaton
        state = automaton.step(self._state, token)
        match_len = automaton.match_len(state)
        if match_len and may_match:
            text = self.flush()
            start = self._starts[-match_len] - self._num_out
            return text if self._include else text[:start], self._word_text(list(self._tokens)[-match_len:])
        self._state = state = automaton.pending(state)
        pending_len = automaton.depth(state)
        return self._take(self._starts[-pending_len] if pending_len else self._num_chars), None

    def push_end(self, piece: str, *, may_match: bool) -> tuple[str, str | None]:
        """Process the text after the last token, which may complete a stop string. Nothing is held back."""
        matched = self._push_text(piece, may_match)
        return self.flush(), matched

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        text, self._held = self._held, ""
        return text if self._strings is None else text + self._strings.flush()

    def _push_text(self, piece: str, may_match: bool) -> str | None:
        matched = None
        if self._strings is not None:
            piece, matched = self._strings.push(piece, may_match=may_match)
        self._held += piece
        return matched

    def _take(self, end: int) -> str:
        """Return the held text up to character `end` of the sequence, as far as the stop strings allow."""
        count = end - self._num_out
        text, self._held = self._held[:count], self._held[count:]
        self._num_out += len(text)
        return text
