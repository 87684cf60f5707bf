"""JsonList: a list that is encoded piece by piece as it grows. One call of the encoder blocks all threads,
for the largest answers a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class JsonList:
    """Entries as JSON, without the brackets."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def extend(self, values: Sequence[object]) -> None:
        if values:
            if self.data:
                self.data += b","
            self.data += _encode(values)[1:-1]


def encoded_as(_: type[T], *parts: bytes | bytearray) -> T:
    """Return JSON that is copied when a value of the type is encoded in its place."""
    return cast(T, msgspec.Raw(b"".join(parts)))
