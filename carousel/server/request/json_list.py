"""JsonList: a list that is encoded as it grows, a piece at a time. One call of the encoder holds up all
threads, for the largest answers as a whole a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class JsonList:
    """The entries as JSON, without the brackets."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def extend(self, values: Sequence[object]) -> None:
        if values:
            if self.data:
                self.data += b","
            self.data += _encode(values)[1:-1]


def encoded_as(_: type[T], *parts: bytes | bytearray) -> T:
    """JSON that stands for a value of the type in something that is encoded: it is copied."""
    return cast(T, msgspec.Raw(b"".join(parts)))
