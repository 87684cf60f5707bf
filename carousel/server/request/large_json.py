"""LargeJson, BodyBytes: JSON of megabytes, looked at in pieces between which other tasks of the loop run.

msgspec goes through a value in one piece, 8 MiB of it in up to 40 ms. So a large value is first cut into its
parts, which takes no more than knowing where strings and brackets begin and end; the rest, which msgspec
decodes, is small. Only msgspec decides what is valid JSON: every part that is cut out is decoded or refused
by it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 128 << 10
"""Size of a piece that is cut or decoded at once: at most 2 ms (2026-11)."""
SEGMENT_BYTES = 128 << 10
MAX_NAME_BYTES = 1 << 10
QUOTE, COMMA, COLON, SPACE = b'",: '
FEW_BYTES = 256
CLOSING = ord("]")
MARKS_AT_ONCE = 256
ESCAPE_BYTES = 6
"""Length of the longest escape, \\u12ab. Two of them may stand for one character."""

Wait: TypeAlias = Callable[[int], Awaitable[None]]
"""Function that waits for a turn in which so many bytes may be processed."""

_SPACES = b" \t\n\r"
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
# One level down for each opening bracket, one up for each closing one.
_STEPS = bytes({0x5B: 1, 0x7B: 1, 0x5D: 255, 0x7D: 255}.get(byte, 0) for byte in range(256))
_NONE = np.zeros(0, np.int64)

_decode_text = msgspec.json.Decoder(str).decode


class Span(NamedTuple):
    """Place of a value: from `start` up to, but not including, `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class TooManyParts(Exception):
    """Raised for a list or an object with more parts than allowed."""


class TooManyChars(Exception):
    """Raised for a string with more characters than allowed."""


class BodyBytes:
    """Body of a request as it arrives, in segments that are never moved.

    A single growing array of megabytes would be copied again and again, up to 4 MiB in a turn of the event
    loop, and would touch each of its new pages for the first time.
    """

    __slots__ = ("_segments", "_size")

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self._segments = [bytearray()]
        """Segments, all full except the last."""
        self._size = 0
        self.append(data)

    def append(self, data: bytes | bytearray) -> None:
        self._size += len(data)
        segment = self._segments[-1]
        if len(segment) + len(data) <= SEGMENT_BYTES:
            segment += data
            return
        rest = memoryview(data)
        while len(rest):
            if len(segment) == SEGMENT_BYTES:
                segment = bytearray()
                self._segments.append(segment)
            part = rest[: SEGMENT_BYTES - len(segment)]
            segment += part
            rest = rest[len(part) :]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: int) -> int:
        """Return the byte at a place from the beginning."""
        return self._segments[at // SEGMENT_BYTES][at % SEGMENT_BYTES]

    def read(self, start: int, end: int) -> bytes:
        """Return a copy of the bytes from `start` up to, not including, `end`, or to the last one."""
        parts = []
        while start < min(end, self._size):
            number, at = divmod(start, SEGMENT_BYTES)
            parts.append(memoryview(self._segments[number])[at : at + end - start])
            start += len(parts[-1])
        return b"".join(parts)

    @property
    def first_segment(self) -> bytearray:
        """Return the beginning: the whole body if it has at most SEGMENT_BYTES."""
        return self._segments[0]


class LargeJson:
    def __init__(self, data: BodyBytes, wait: Wait) -> None:
        self._data = data
        self._wait = wait

    def first(self, span: Span) -> int:
        """Return the first byte of a value without white space before it; 0 if there is none."""
        return self._data[span.start] if span.size else 0

    async def read(self, span: Span) -> bytes:
        """Return the bytes of a small value."""
        await self._wait(span.size)
        return self._bytes(span)

    async def whole(self) -> Span:
        """Return the place of the whole value."""
        return await self._trimmed(Span(0, len(self._data)))

    async def inside(self, span: Span) -> Span:
        """Return the place of the contents of a list, between its brackets. Raises msgspec.DecodeError."""
        if span.size < 2 or self._data[span.end - 1] != CLOSING:
            raise msgspec.DecodeError("a list does not end")
        return await self._trimmed(Span(span.start + 1, span.end - 1))

    async def comma_pieces(self, span: Span) -> AsyncIterator[bytes]:
        """Yield pieces of a list of numbers, cut at commas. Raises msgspec.DecodeError."""
        start = span.start
        while start < span.end:
            piece = await self.read(Span(start, min(start + PIECE_BYTES // 2, span.end)))
            if start + len(piece) < span.end:
                if (comma := piece.rfind(b",")) < 0:
                    raise msgspec.DecodeError(f"there is no comma in {len(piece)} bytes of a list")
                piece = piece[:comma]
            yield piece
            start += len(piece) + 1
        if span.size and start == span.end:
            raise msgspec.DecodeError("a list ends with a comma")

    async def elements(self, span: Span, most: int) -> AsyncIterator[Span]:
        """Yield the places of a list's elements. Raises TooManyParts, msgspec.DecodeError."""
        start = span.start + 1
        async for marks in self._marks(span, b"[]", (COMMA,), most):
            for number, at in enumerate(marks, 1):
                if not number % MARKS_AT_ONCE:
                    await self._wait(PIECE_BYTES)
                element = await self._trimmed(Span(start, at))
                if element.size:
                    yield element
                elif start > span.start + 1 or at < span.end - 1:
                    raise msgspec.DecodeError("nothing is between two commas")
                start = at + 1

    async def fields(
        self, span: Span, most: int, max_bytes: Callable[[str], int]
    ) -> AsyncIterator[tuple[str, Span]]:
        """Yield the fields of an object. A field may have `max_bytes` of its name; a longer one is returned
        as far as it has been read, and is the last. Raises TooManyParts, msgspec.DecodeError, and what
        `max_bytes` raises.
        """
        start, name, room = span.start + 1, "", 0
        is_name = True
        seen = span.start
        async for marks in self._marks(span, b"{}", (COMMA, COLON), 2 * most):
            for at in marks:
                if (self._data[at] == COLON) != is_name:
                    if start == span.start + 1 and not (await self._trimmed(Span(start, at))).size:
                        return  # an object without fields
                    raise msgspec.DecodeError("the fields of an object are names, colons and values")
                if is_name:
                    name = self._name(Span(start, at))
                    room = max_bytes(name)
                else:
                    value = await self._trimmed(Span(start, at))
                    if not value.size:
                        raise msgspec.DecodeError("a field has no value")
                    yield name, value
                is_name = not is_name
                start = at + 1
            seen = min(seen + PIECE_BYTES, span.end)
            if not is_name and seen - start > room:
                yield name, Span(start, seen)
                return

    async def text(self, span: Span, max_chars: int | None = None) -> str:
        """Return the value of a string. Raises msgspec's errors, UnicodeDecodeError; TooManyChars once
        `max_chars` of it have been decoded and more follow.
        """
        parts: list[str] = []
        num_chars = 0
        at, end = span.start + 1, span.end - 1
        if span.size < 2 or self._data[end] != QUOTE:
            raise msgspec.DecodeError("a string does not end")
        while at < end:
            piece = await self.read(Span(at, min(at + PIECE_BYTES, end)))
            if at + len(piece) < end:
                piece = piece[: _end_of_character(piece)]
            parts.append(_decode_text(b'"%b"' % piece))
            num_chars += len(parts[-1])
            if max_chars is not None and num_chars > max_chars:
                raise TooManyChars
            at += len(piece)
        return "".join(parts)

    async def _trimmed(self, span: Span) -> Span:
        """Return the place without white space around it."""
        start, end = span
        if end > start and self._data[start] > SPACE and self._data[end - 1] > SPACE:
            return span
        while start < end and self._data[start] <= SPACE:
            num_spaces = _num_spaces(self._data.read(start, min(start + PIECE_BYTES, end)))
            if not num_spaces:
                break
            start += num_spaces
            await self._wait(num_spaces)
        size = FEW_BYTES
        while tail := self._bytes(Span(max(start, end - size), end)):
            num_spaces = len(tail) - len(tail.rstrip(_SPACES))
            end -= num_spaces
            if num_spaces < len(tail):
                break
            await self._wait(size)
            size = PIECE_BYTES
        return Span(start, end)

    def _bytes(self, span: Span) -> bytes:
        return self._data.read(span.start, span.end)

    def _name(self, span: Span) -> str:
        if span.size > MAX_NAME_BYTES:
            raise msgspec.DecodeError(f"the name of a field has more than {MAX_NAME_BYTES} bytes")
        return _decode_text(self._bytes(span))

    async def _marks(
        self, span: Span, brackets: bytes, marks: tuple[int, ...], most: int
    ) -> AsyncIterator[list[int]]:
        """Yield, for each piece, the places of the marks between the parts of a value, and at last that of
        its closing bracket.
        """
        scanner, num_found = _Scanner(marks), 0
        if self.first(span) != brackets[0]:
            raise msgspec.DecodeError("a value does not begin with a bracket")
        for start in range(span.start, span.end, PIECE_BYTES):
            piece = await self.read(Span(start, min(start + PIECE_BYTES, span.end)))
            found = scanner.scan(piece)
            num_found += len(found)
            if num_found > most:
                raise TooManyParts
            if scanner.depth < 1 and (
                start + len(piece) < span.end or self._data[span.end - 1] != brackets[1]
            ):
                raise msgspec.DecodeError("something follows the end of a value")
            yield (found + start).tolist()
        if scanner.depth:
            raise msgspec.DecodeError("a value does not end")


class _Scanner:
    """Tracks strings and brackets from piece to piece."""

    def __init__(self, marks: tuple[int, ...]) -> None:
        self.depth = 0
        self._marks = marks
        self._is_inside = False
        """True inside a string."""
        self._is_escaped = False
        """True if the next byte follows a backslash that is not itself escaped."""

    def scan(self, piece: bytes) -> NDArray[Any]:
        """Return the places of the marks at depth one, and of the closing bracket."""
        if self._is_escaped:
            piece = b"_" + piece[1:]
        self._is_escaped = False
        if b"\\" in piece:
            # From left to right: a remaining backslash escapes another character, or the next piece's first.
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._is_escaped = piece.endswith(b"\\")
        if self._is_inside and b'"' not in piece:
            return _NONE
        codes = np.frombuffer(piece, np.uint8)
        is_outside = (np.cumsum(codes == QUOTE, dtype=np.uint8) & 1) == self._is_inside
        steps = np.frombuffer(piece.translate(_STEPS), np.int8) * is_outside
        depths = np.cumsum(steps, dtype=np.int32)
        depths += self.depth
        is_mark = codes == self._marks[0]
        for mark in self._marks[1:]:
            is_mark |= codes == mark
        is_mark &= is_outside & (depths == 1)
        is_mark |= (steps < 0) & (depths == 0)
        self.depth = int(depths[-1])
        self._is_inside = not is_outside[-1]
        return np.flatnonzero(is_mark)


def _num_spaces(piece: bytes) -> int:
    """Return the number of white-space bytes at the beginning."""
    return len(piece) - len(piece.lstrip(_SPACES))


def _end_of_character(piece: bytes) -> int:
    """Return the place where a piece of a continuing string may end: after a whole character, however it is
    spelled.
    """
    plain = piece.replace(b"\\\\", b"__")
    escape = plain.rfind(b"\\")
    if escape >= len(piece) - ESCAPE_BYTES:
        pair = escape - ESCAPE_BYTES
        return pair if pair >= 0 and _HIGH_SURROGATE.match(plain, pair) else escape
    end = len(piece)
    # UTF-8: the last character may have up to three more bytes than are here.
    for back in range(1, 5):
        if piece[end - back] & 0xC0 != 0x80:
            return end - back if piece[end - back] >= 0xC0 else end
    return end
