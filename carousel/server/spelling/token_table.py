"""TokenTable: what is known of single tokens, made when it is first needed and kept within a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_KNOWN = 1 << 15
"""Number of tokens after which a table is made anew: at up to half a KB each, a table has 16 MB at most."""


class TokenTable(dict[int, T]):
    """Values by token id. Looking up one that is not there makes it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        value = self._make(token_id)
        if len(self) >= MAX_KNOWN:
            self.clear()
        self[token_id] = value
        return value


class TokenTables:
    """Tables of one vocabulary, which all its answers share."""

    def __init__(self) -> None:
        self._tables: dict[str, TokenTable[Any]] = {}

    def of(self, name: str, make: Callable[[int], T]) -> TokenTable[T]:
        """Return the table of this name. `make` makes its values, if there is none yet."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = TokenTable(make)
        return table
