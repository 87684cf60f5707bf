"""Reader: gives parsers the text of an answer as it comes.

A parser is a generator that yields when it needs more text, and adds what it has found to `events`. The
events depend on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from carousel.server.chat.events import Event, ItemBegun, ItemDelta, ItemDone, ItemKind
from carousel.server.chat.tools import ToolSet

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Generator that yields when more text is needed."""
Sink: TypeAlias = Callable[[str], None]

MAX_RUN = 4096
"""Maximum number of characters of a name, a number or the like."""
MAX_DEPTH = 512
"""Maximum depth of nested lists and objects in the arguments of a call."""
NUM_ID_BYTES = 12

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
"""Characters of a JSON string that stand for themselves."""
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_ATOM = re.compile(r"[-+.0-9A-Za-z]*")
_VALID_ATOM = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_Expected: TypeAlias = Literal["value", "value or end", "key", "key or end", "colon", "comma or end"]


class Markers:
    """Spellings that have a meaning in a format. None of them begins another."""

    def __init__(self, *spellings: str) -> None:
        pattern = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self.search = pattern.search
        self.remove: Callable[[str], str] = partial(pattern.sub, "")
        firsts = "".join(sorted({spelling[0] for spelling in spellings}))
        self._search_first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)").search
        self._prefixes = {spelling[:end] for spelling in spellings for end in range(1, len(spelling))}
        self._max = max(map(len, self._prefixes), default=0)

    def leave(self, text: str) -> bool:
        """Return True if a text contains no marker, and does not end with what may be the beginning
        of one.
        """
        if self._search_first(text) is None:
            return True
        return self.search(text) is None and not self.num_held(text, 0)

    def num_held(self, text: str, start: int) -> int:
        """Return the number of characters at the end of a text, from `start` on, that may be the beginning of
        a marker.
        """
        if self._search_first(text, max(start, len(text) - self._max)) is None:
            return 0
        for size in range(min(self._max, len(text) - start), 0, -1):
            if text[-size:] in self._prefixes:
                return size
        return 0


NO_MARKERS = Markers()


class Reader:
    __slots__ = (
        "_begun",
        "_call",
        "_events",
        "_item",
        "_marker",
        "_max_calls",
        "_parts",
        "_space",
        "_tried",
        "ended",
        "has_reasoning",
        "is_thinking",
        "last_is_whole",
        "num_whole_calls",
        "pos",
        "quiet",
        "text",
        "tools",
    )

    def __init__(self, tools: ToolSet, *, max_calls: int | None = None) -> None:
        """`max_calls`: calls beyond this number are left out of the answer."""
        self.text = ""
        """Text that is not parsed yet, from `pos` on."""
        self.pos = 0
        self.ended = False
        """True if nothing follows `text`."""
        self.tools = tools
        self.quiet: Markers | None = None
        """Markers that can end the text item, if nothing is held back; None otherwise."""
        self.has_reasoning = False
        self.is_thinking = False
        """True inside reasoning that has not ended."""
        self.num_whole_calls = 0
        self.last_is_whole = False
        """True if the arguments of the last call are complete."""
        self._max_calls = max_calls
        self._tried: list[str] | None = None
        """Pieces of the attempted call, before those in `text`; None if there is no attempt."""
        self._begun = 0
        """Place in `text` where the attempted call begins."""
        self._marker = ""
        """Marker at the beginning of the attempted call."""
        self._events: list[Event] = []
        self._parts: list[str] = []
        """New text of the item, after the events."""
        self._item: ItemKind | None = None
        self._call = 0
        """Number of calls that have begun."""
        self._space: list[str] | None = [] if tools.names else None
        """White space that belongs to the text only if more text follows: at the start, and after a call."""

    def feed(self, text: str) -> None:
        if self._tried is not None:
            self._tried.append(self.text[self._begun : self.pos])
            self._begun = 0
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        self._tell()
        events, self._events = self._events, []
        return events

    # -- results ---------------------------------------------------------------------------------------------

    def say(self, text: str, kind: ItemKind = "text") -> None:
        """Add text, or reasoning."""
        if not text:
            return
        if kind == "text" and self._space is not None:
            if text.isspace():
                self._space.append(text)
                return
            text, self._space = "".join(self._space) + text, None
        self._begin(kind)
        self._parts.append(text)

    def begin_call(self, name: str) -> None:
        """Begin a call, whose arguments follow. The attempt has turned out to be a call."""
        self._tried = None
        self._call += 1
        if self._is_shown:
            self.end_item()
            self._item = "tool_call"
            self._events.append(ItemBegun("tool_call", new_call_id(), name))
        self._space = []

    def add(self, arguments: str) -> None:
        """Add to the JSON of the call's arguments."""
        if self._is_shown and arguments:
            self._parts.append(arguments)

    def end_call(self, *, is_whole: bool) -> None:
        self.last_is_whole = is_whole
        if self._is_shown:
            self.num_whole_calls += is_whole
            self.end_item(is_whole=is_whole)

    def end_item(self, *, is_whole: bool = True) -> None:
        self._tell()
        if self._item is not None:
            self._events.append(ItemDone(self._item, is_whole))
            self._item = None

    def end(self) -> None:
        """End the answer. If white space is all there is, it is the text."""
        if self._space and not self._call:
            text, self._space = "".join(self._space), None
            self.say(text)
        self.end_item()

    @property
    def _is_shown(self) -> bool:
        return self._max_calls is None or self._call <= self._max_calls

    def _begin(self, kind: ItemKind) -> None:
        if self._item != kind:
            self.end_item()
            self._item = kind
            self.has_reasoning |= kind == "reasoning"
            self._events.append(ItemBegun(kind))

    def _tell(self) -> None:
        if self._parts and self._item is not None:
            self._events.append(ItemDelta(self._item, "".join(self._parts)))
            self._parts = []

    # -- attempts --------------------------------------------------------------------------------------------

    def mark(self, marker: str = "") -> None:
        """Begin an attempt: the following text, after the marker, may be a call."""
        self._tried, self._begun, self._marker = [], self.pos, marker

    def rewind(self) -> None:
        """Go back to the beginning of the attempt, with its marker."""
        if self._tried is None:
            return
        if self._tried:
            self.text = "".join(self._tried) + self.text
            self._begun = 0
        self.pos, self._tried = self._begun, None

    def settle(self) -> None:
        """Accept the attempt."""
        self._tried = None

    def give_up(self, say: Sink | None = None) -> None:
        """Give up the attempt: the marker at its beginning is text, and the rest is parsed again. No effect
        once the call has begun.
        """
        if self._tried is not None:
            self.rewind()
            self.pos += len(self._marker)
            (say or self.say)(self._marker)

    # -- input -----------------------------------------------------------------------------------------------

    def until(self, markers: Markers, say: Sink | None = None) -> Steps[str]:
        """Pass text on up to the next marker, with which an attempt begins. Returns the marker, or "" at the
        end.
        """
        is_text = say is None
        say = say or self.say
        while True:
            self.quiet = None
            found = markers.search(self.text, self.pos)
            end = len(self.text)
            if found is not None:
                end = found.start()
            elif not self.ended:
                end -= markers.num_held(self.text, self.pos)
            say(self.text[self.pos : end])
            self.pos = end
            if found is not None:
                self.mark(found.group())
                self.pos = found.end()
                return found.group()
            if self.ended:
                return ""
            if is_text and self._item == "text" and self._space is None and end == len(self.text):
                self.quiet = markers
            yield

    def space(self) -> Steps[None]:
        """Move past white space."""
        while True:
            self.pos = self._after_space()
            if self.pos < len(self.text) or self.ended:
                return
            yield

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end."""
        while self.pos == len(self.text) and not self.ended:
            yield
        return self.text[self.pos : self.pos + 1]

    def take(self, literal: str) -> Steps[bool]:
        """Move past `literal` if it comes next. Returns False if it does not."""
        while True:
            rest = self.text[self.pos : self.pos + len(literal)]
            if rest == literal:
                self.pos += len(literal)
                return True
            if self.ended or not literal.startswith(rest):
                return False
            yield

    def follows(self, literals: tuple[str, ...]) -> Steps[bool]:
        """Return True if one of these comes next, or if the text ends within the beginning of one."""
        longest = max(map(len, literals))
        while True:
            rest = self.text[self.pos : self.pos + longest]
            if rest.startswith(literals):
                return True
            may_follow = any(each.startswith(rest) for each in literals)
            if self.ended or not may_follow:
                return may_follow
            yield

    def run(self, pattern: re.Pattern[str], *, most: int = MAX_RUN) -> Steps[str]:
        """Return the next characters up to the first that is not in a class, at most `most`. `pattern`
        matches any number of characters of the class.
        """
        size = 0
        while True:
            found = pattern.match(self.text, self.pos + size, self.pos + most)
            size = size if found is None else found.end() - self.pos
            if self.pos + size < len(self.text) or size == most or self.ended:
                text = self.text[self.pos : self.pos + size]
                self.pos += size
                return text
            yield

    def here(self, pattern: re.Pattern[str]) -> str:
        """Return the match at this place with the text that is there already; "" for none."""
        found = pattern.match(self.text, self.pos)
        text = "" if found is None else found.group()
        self.pos += len(text)
        return text

    def json_value(self, sink: Sink) -> Steps[bool]:
        """Parse one JSON value and give its text to `sink` as it comes; of an object from its first character
        on. Returns False if there is none or it breaks off. Control characters in strings, and backslashes
        that escape nothing, are escaped.
        """
        closing: list[str] = []
        expected: _Expected = "value"
        while True:
            end = self._after_space()
            sink(self.text[self.pos : end])
            self.pos = end
            if end == len(self.text):
                if self.ended:
                    return False
                yield
                continue
            char = self.text[self.pos]
            if closing and char == closing[-1] and expected.endswith("or end"):
                closing.pop()
                self._pass(char, sink)
                expected = "comma or end"
            elif expected == "comma or end" and char == ",":
                self._pass(char, sink)
                expected = "key" if closing[-1] == "}" else "value"
            elif expected == "colon" and char == ":":
                self._pass(char, sink)
                expected = "value"
            elif char == '"' and expected not in ("colon", "comma or end"):
                if not (yield from self._json_string(sink)):
                    return False
                expected = "colon" if expected.startswith("key") else "comma or end"
            elif not expected.startswith("value"):
                return False
            elif char in "[{" and len(closing) < MAX_DEPTH:
                closing.append("]" if char == "[" else "}")
                self._pass(char, sink)
                expected = "value or end" if char == "[" else "key or end"
            else:
                atom = yield from self.run(_ATOM)
                if not _VALID_ATOM.fullmatch(atom):
                    self.pos -= len(atom)
                    return False
                sink(atom)
                expected = "comma or end"
            if not closing and expected == "comma or end":
                return True

    def _json_string(self, sink: Sink) -> Steps[bool]:
        self._pass('"', sink)
        while True:
            if plain := self.here(_PLAIN):
                sink(plain)
            if self.pos == len(self.text):
                if self.ended:
                    return False
                yield
                continue
            char = self.text[self.pos]
            if char == '"':
                self._pass(char, sink)
                return True
            if char != "\\":
                self.pos += 1
                sink(f"\\u{ord(char):04x}")
            elif escape := self.here(_ESCAPE):
                sink(escape)
            elif _BEGUN_ESCAPE.fullmatch(self.text, self.pos) and not self.ended:
                yield
            else:
                self.pos += 1
                sink("\\\\")

    def _pass(self, text: str, sink: Sink) -> None:
        self.pos += len(text)
        sink(text)

    def _after_space(self) -> int:
        found = _SPACE.match(self.text, self.pos)
        assert found is not None
        return found.end()


def widen_marker(r: Reader) -> None:
    """Make all text since the beginning of the attempt its marker, so that none of it is parsed again."""
    if r._tried is not None:
        r._marker = "".join((*r._tried, r.text[r._begun : r.pos]))


def is_number(text: str) -> bool:
    """Return True for a JSON number."""
    return text[:1] in "-0123456789" and _VALID_ATOM.fullmatch(text) is not None


def new_call_id() -> str:
    return "call_" + secrets.token_hex(NUM_ID_BYTES)
