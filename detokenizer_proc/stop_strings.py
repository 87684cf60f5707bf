"""Stop strings: finds the first one in text that comes in pieces, and holds back what may become one.

    text so far   ... out ... | held |        held: the longest end of the text that begins a stop string

The match that is complete first wins, and of those that are complete with the same character the longest. So
the result does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Watches the text of one sequence. Costs nothing per character that begins no stop string."""

    __slots__ = ("_first_characters", "_held", "_include", "_max_held", "_min_len", "_stops")

    def __init__(self, stops: Sequence[str], *, include_match: bool) -> None:
        """`include_match`: the matched string stays in the text. No stop string is empty."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._include = include_match
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._max_held = max(map(len, stops)) - 1
        self._min_len = min(map(len, stops))
        self._held = ""

    def concerns(self, piece: str) -> bool:
        """Whether this piece is more than text that may go out as it is, without a `push`."""
        return bool(self._held) or not self._first_characters.isdisjoint(piece)

    def push(self, piece: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Take the next piece: (text that may go out, the stop string it completed or None).

        With `may_match` False no stop string ends in this piece, though a later one may begin in it.
        After a match nothing may be pushed.
        """
        if not self.concerns(piece):
            return piece, None
        text = self._held + piece
        if may_match and len(text) >= self._min_len:
            match = self._find(text, len(self._held))
            if match is not None:
                end, stop = match
                self._held = ""
                return text[: end if self._include else end - len(stop)], stop
        self._held = self._pending_end(text)
        return text[: len(text) - len(self._held)], None

    def push_end(self, piece: str, *, may_match: bool) -> tuple[str, str | None]:
        """Take the last piece: as `push`, but nothing is held back after it."""
        text, matched = self.push(piece, may_match=may_match)
        return text + self.flush(), matched

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The first match that ends beyond `num_old` characters of `text`: its end and the stop string."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = end, stop
        return best

    def _pending_end(self, text: str) -> str:
        """The longest end of `text` that begins a stop string."""
        first = len(text)
        low = max(0, first - self._max_held)
        for stop in self._stops:
            start = text.find(stop[0], low, first)
            while start >= 0:
                if stop.startswith(text[start:]):
                    first = start
                    break
                start = text.find(stop[0], start + 1, first)
        return text[first:]
