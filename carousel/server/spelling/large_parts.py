"""LargeParts: the parts of an answer's JSON that are spelled only while it is written.

Log-probabilities, logits and vectors take ten to sixty times as much memory as JSON as they do packed. So an
answer is encoded with a mark in the place of each, and spelled a piece at a time, as fast as it is read.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar, cast

import msgspec

from carousel.client.core.result import Completion
from runtime.wire.format import FloatArray

T = TypeVar("T")

Pieces: TypeAlias = Callable[[], Iterable[bytes]]
"""Function that spells a part anew, with a few milliseconds' work for each piece."""
# Nothing that a caller sends can contain it, because no answer shows it.
_MARK = uuid.uuid4().hex
NUMBERS_AT_ONCE = 8192
_encode = msgspec.json.Encoder().encode
_MARKS = re.compile(rf'"{_MARK}-(\d+)"'.encode())


class WholeFormat(ABC):
    """Format of answers that are never large enough to be written in pieces; base class."""

    @property
    def is_parsed(self) -> bool:
        return False

    @abstractmethod
    def response(self, completions: Sequence[Completion]) -> msgspec.Struct:
        """Return the body of an answer that is not streamed."""

    def pieces(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the body as the only piece."""
        yield _encode(self.response(completions))


class LargeParts:
    """Parts of one answer."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[Pieces] = []

    def add(self, _: type[T], make: Pieces) -> T:
        """Return a mark that is encoded in the place of a value of the type."""
        self._parts.append(make)
        return cast(T, msgspec.Raw(f'"{_MARK}-{len(self._parts) - 1}"'.encode()))

    def filled(self, data: bytes) -> Iterator[bytes]:
        """Yield encoded JSON in pieces, with the parts in the place of their marks. A mark may be there more
        than once.
        """
        texts = iter(_MARKS.split(data))
        yield next(texts)
        for number in texts:
            yield from self._parts[int(number)]()
            yield next(texts)


def rows_json(rows: FloatArray) -> Iterator[bytes]:
    """Yield rows of numbers as JSON, a part of a row at a time."""
    before = b"["
    for row in rows:
        for start in range(0, max(len(row), 1), NUMBERS_AT_ONCE):
            part = _encode(row[start : start + NUMBERS_AT_ONCE].tolist())[1:-1]
            yield before + b"[" + part if start == 0 else b"," + part
        yield b"]"
        before = b","
    yield b"]" if len(rows) else b"[]"


def listed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a list in brackets. Each piece is the JSON of some entries, with commas between them."""
    before = b"["
    for piece in pieces:
        if piece:
            yield before + piece
            before = b","
    yield b"]" if before == b"," else b"[]"
