"""Log-probabilities of tokens: TokenLogprob, and LogprobColumns, which keeps those of many tokens packed. A
prompt of 1,000 tokens with the 20 most likely ones for each is 164 KB packed. As objects it would be 2 MB,
which the garbage collector would traverse again and again during the request.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, TypeVar, cast, overload

import numpy as np

from runtime.wire.format import TOKEN_BYTES, FloatArray, IntArray, pack_ids, unpack_floats, unpack_ids

UNKNOWN_ID = -1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, computed from the raw logits."""

    token_id: int
    """Id of the token; UNKNOWN_ID (-1) in a prompt given as text or messages, or with truncate_prompt_tokens,
    because the client does not know these ids.
    """
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Most likely tokens as (token id, logprob), as many as were asked for, most likely first."""
    rank: int | None = None
    """Place of the token among all, 1 for the most likely; None in an output, of which it is not told."""


PromptLogprobs: TypeAlias = Sequence[TokenLogprob | None]
"""Log-probabilities of a prompt: one TokenLogprob for each of its tokens, as far as they were computed. The
first is None, because nothing precedes it.
"""
Packed: TypeAlias = bytes | bytearray
E = TypeVar("E")


class LogprobArrays(NamedTuple):
    """Log-probabilities of n tokens with k most likely ones each, in the order of their positions."""

    ids: IntArray
    values: FloatArray
    top_ids: IntArray
    """Ids of the most likely tokens, [n * k]."""
    top_values: FloatArray
    ranks: IntArray
    """Ranks of the tokens; empty if they are not known."""


class LogprobColumns(Sequence[E]):
    """Sequence of log-probabilities in packed form. An entry is made when it is accessed; a slice is packed
    again. It equals any sequence of the same entries.
    """

    __slots__ = ("_ids", "_num_none", "_ranks", "_top_ids", "_top_values", "_values")

    def __init__(
        self,
        ids: Packed = b"",
        values: Packed = b"",
        top_ids: Packed = b"",
        top_values: Packed = b"",
        ranks: Packed = b"",
        *,
        num_none: int = 0,
    ) -> None:
        """ids: of n tokens, int32. values: their logprobs, float32. top_ids, top_values: [n, k], of the most
        likely tokens. ranks: of the tokens, int32, or none. num_none: number of None entries before all
        others.
        """
        assert len(ids) == len(values), "tokens without logprobs in a sequence that has some"
        self._ids, self._values, self._top_ids, self._top_values = ids, values, top_ids, top_values
        self._ranks = ranks
        self._num_none = num_none

    def __len__(self) -> int:
        return self._num_none + len(self._values) // TOKEN_BYTES

    @property
    def num_top(self) -> int:
        """Number of most likely tokens of each entry."""
        return len(self._top_ids) // len(self._values) if self._values else 0

    @property
    def num_none(self) -> int:
        """Number of None entries, which come before all others."""
        return self._num_none

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all columns."""
        columns = (self._ids, self._values, self._top_ids, self._top_values, self._ranks)
        return sum(map(len, columns))

    def arrays(self) -> LogprobArrays:
        """Return copies of the columns of all entries that are not None."""
        return LogprobArrays(
            _ids(self._ids),
            _floats(self._values),
            _ids(self._top_ids),
            _floats(self._top_values),
            _ids(self._ranks),
        )

    @overload
    def __getitem__(self, index: SupportsIndex) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[E]: ...
    def __getitem__(self, index: Any) -> E | Sequence[E]:
        if isinstance(index, slice):
            places = range(len(self))[index]
            if places.step != 1:
                return [self[place] for place in places]
            return self.part(places.start, max(places.start, places.stop))
        place = range(len(self))[operator.index(index)]
        (entry,) = self.part(place, place + 1)
        return entry

    def __iter__(self) -> Iterator[E]:
        ids = _ids(self._ids).tolist()
        columns: list[Iterable[Any]] = [ids, _floats(self._values).tolist()]
        if self._top_ids:
            rows = [
                column.reshape(len(ids), -1).tolist()
                for column in (_ids(self._top_ids), _floats(self._top_values))
            ]
            columns.append(map(tuple, map(zip, *rows)))
        if self._ranks:
            columns += [repeat(())] * (not self._top_ids)
            columns.append(_ids(self._ranks).tolist())
        entries = map(TokenLogprob, *columns)
        return cast(Iterator[E], chain(repeat(None, self._num_none), entries))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[E]) -> list[E]:
        return [*self, *other]

    def __radd__(self, other: Sequence[E]) -> list[E]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def extend(self, following: LogprobColumns[E]) -> None:
        """Append the entries of the tokens that follow, which must have the same number of most likely
        tokens.
        """
        if not len(following):
            return
        if self._values:
            assert not following._num_none
            assert following.num_top == self.num_top
            assert bool(following._ranks) == bool(self._ranks)
        self._num_none += following._num_none
        self._ids = _joined(self._ids, following._ids)
        self._values = _joined(self._values, following._values)
        self._top_ids = _joined(self._top_ids, following._top_ids)
        self._top_values = _joined(self._top_values, following._top_values)
        self._ranks = _joined(self._ranks, following._ranks)

    def part(self, start: int, stop: int) -> LogprobColumns[E]:
        """Return the entries from `start` to `stop`, neither of which is negative."""
        first = TOKEN_BYTES * max(0, start - self._num_none)
        last = TOKEN_BYTES * max(0, stop - self._num_none)
        num_top = self.num_top
        return LogprobColumns(
            self._ids[first:last],
            self._values[first:last],
            self._top_ids[first * num_top : last * num_top],
            self._top_values[first * num_top : last * num_top],
            self._ranks[first:last],
            num_none=max(0, min(stop, self._num_none) - start),
        )


NO_LOGPROBS: LogprobColumns[Any] = LogprobColumns()
"""Empty columns, not to be extended."""


def packed_logprobs(entries: Sequence[Any]) -> LogprobColumns[Any]:
    """Return entries in packed form. All have as many most likely tokens, and None come first."""
    if isinstance(entries, LogprobColumns):
        return entries
    some: list[TokenLogprob] = [each for each in entries if each is not None]
    tops = [pair for each in some for pair in each.top]
    return LogprobColumns(
        pack_ids([each.token_id for each in some]),
        np.array([each.logprob for each in some], np.float32).tobytes(),
        pack_ids([token_id for token_id, _ in tops]),
        np.array([value for _, value in tops], np.float32).tobytes(),
        pack_ids([each.rank for each in some if each.rank is not None]),
        num_none=len(entries) - len(some),
    )


def _ids(packed: Packed) -> IntArray:
    return unpack_ids(bytes(packed))  # a view of a growing buffer would keep other threads from growing it


def _floats(packed: Packed) -> FloatArray:
    return unpack_floats(bytes(packed))


def _joined(packed: Packed, following: Packed) -> Packed:
    """Append to packed data, in place if it was appended to before."""
    if not following:
        return packed
    if not packed and isinstance(following, bytes):
        return following
    grown = packed if isinstance(packed, bytearray) else bytearray(packed)
    grown += following
    return grown
