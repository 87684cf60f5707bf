"""GrownLogprobs: the logprobs that each event of a stream of /generate repeats.

As JSON they take four times as much memory as packed. So they are kept as JSON while all streams together
have little of it, and packed from there on: what is packed is spelled for each event anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from carousel.client.core.logprobs import LogprobColumns, PromptLogprobs, packed_logprobs
from carousel.server.spelling.logprob_json import NumberFrame, in_pieces, top_json, values_json
from carousel.server.spelling.token_table import TokenTable

ROOM_BYTES = 16 << 20
SLICE_BYTES = 64 << 10
MANY_ENTRIES = 256
"""Number of entries that come together, from which on they are kept as they are and not joined to others."""
COST_OF_SPELLING = 4
"""Time that spelling takes beside writing what was spelled, which counts as one."""


class JsonRoom:
    """Bytes of JSON that the streams of a process may keep."""

    def __init__(self, size: int = ROOM_BYTES) -> None:
        self.num_left = size


class GrownLogprobs:
    """Logprobs of the tokens of a sequence or a prompt so far, in the order of their positions."""

    def __init__(self, frames: TokenTable[NumberFrame], num_top: int, room: JsonRoom) -> None:
        self._frames = frames
        self._num_top = num_top
        self._room = room
        self._values = bytearray()
        """JSON of the first entries, without brackets."""
        self._tops = bytearray()
        """JSON of their most likely tokens."""
        self._rest: list[tuple[array[int], LogprobColumns[Any]]] = []
        """Entries that follow, with the ids of their tokens."""

    def __del__(self) -> None:
        # Those of whole answers, which may end in another thread, have none: the sum is of one thread only.
        if num_bytes := len(self._values) + len(self._tops):
            self._room.num_left += num_bytes

    @property
    def is_packed(self) -> bool:
        """Return True if some of it is spelled for each event."""
        return bool(self._rest)

    @property
    def num_bytes(self) -> int:
        return len(self._values) + len(self._tops) + sum(columns.num_bytes for _, columns in self._rest)

    def add(self, ids: Sequence[int], entries: PromptLogprobs) -> Iterator[None]:
        """Append entries. Yields between the pieces of many, so that other tasks may run."""
        if len(entries) >= MANY_ENTRIES and (self._rest or self._room.num_left <= 0):
            self.hold(ids, entries)  # without a copy
            return
        start = 0
        for piece in in_pieces(packed_logprobs(entries), self._num_top):
            of_piece = ids[start : start + len(piece)]
            start += len(piece)
            if not self._rest and self._room.num_left > 0:
                before = len(self._values) + len(self._tops)
                _append(self._values, values_json(piece, of_piece, self._frames))
                if self._num_top:
                    _append(self._tops, top_json(piece, self._frames, self._num_top))
                self._room.num_left -= len(self._values) + len(self._tops) - before
            else:
                self._pack(of_piece, packed_logprobs(piece))
            yield

    def hold(self, ids: Sequence[int], entries: PromptLogprobs) -> None:
        """Append entries that are spelled when they are written. They must not grow: they are not copied."""
        if entries:
            self._rest.append((array("i", ids), packed_logprobs(entries)))

    def values(self) -> Iterator[bytes]:
        """Yield the entries as JSON, in pieces, without brackets."""
        yield from _slices(self._values)
        rest = (values_json(piece, ids, self._frames) for ids, piece in self._pieces())
        yield from _joined(rest, has_some=bool(self._values))

    def tops(self) -> Iterator[bytes]:
        """Yield the most likely tokens of each entry as JSON, in pieces, without brackets."""
        yield from _slices(self._tops)
        rest = (top_json(piece, self._frames, self._num_top) for _, piece in self._pieces())
        yield from _joined(rest, has_some=bool(self._tops))

    def _pieces(self) -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
        for ids, columns in self._rest:
            start = 0
            for piece in in_pieces(columns, self._num_top):
                yield ids[start : start + len(piece)], piece
                start += len(piece)

    def _pack(self, ids: Sequence[int], entries: LogprobColumns[Any]) -> None:
        if not self._rest or entries.num_none or len(self._rest[-1][0]) >= MANY_ENTRIES:
            self._rest.append((array("i"), LogprobColumns()))
        known, columns = self._rest[-1]
        known.extend(ids)
        columns.extend(entries)


def _append(known: bytearray, new: bytes) -> None:
    if known and new:
        known += b","
    known += new


def _slices(data: bytearray) -> Iterator[bytes]:
    for start in range(0, len(data), SLICE_BYTES):
        yield bytes(data[start : start + SLICE_BYTES])


def _joined(pieces: Iterator[bytes], *, has_some: bool) -> Iterator[bytes]:
    for piece in pieces:
        yield b"," + piece if has_some else piece
        has_some = True
