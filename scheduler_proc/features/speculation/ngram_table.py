"""NgramTable: NgramIndex of many rows at once, over the tokens that the columns have."""

from __future__ import annotations

import numpy as np

from runtime.wire.format import IntArray
from scheduler_proc.core.row_columns import RowArray, RowColumns
from scheduler_proc.features.speculation.ngram_index import (
    EMPTY,
    FACTOR,
    MAX_NGRAM,
    MAX_SLOTS,
    SLOTS_A_TOKEN,
    NgramIndex,
)

MAX_ALL_SLOTS = 1 << 28
"""Slots of all rows: 1 GiB of addresses, of which memory is taken as rows come to use them."""
SIZES = np.arange(1, MAX_NGRAM + 1, dtype=np.int32)[:, None]


class NgramTable:
    """Slots for every row. A row's are those of its NgramIndex, which may look and add as well, but not while
    it is here: it is told what has come when the row leaves.
    """

    def __init__(self, rows: RowColumns) -> None:
        max_rows, max_len = rows.tokens.shape
        num_slots = 1 << (SLOTS_A_TOKEN * max_len - 1).bit_length()
        most = 1 << (MAX_ALL_SLOTS // max_rows).bit_length() - 1
        self._num_slots = min(num_slots, MAX_SLOTS, most)
        self._slots = np.zeros(max_rows * self._num_slots, np.int32)
        self._rows = rows
        self._tokens = rows.tokens.reshape(-1)
        self._max_len = max_len
        self._mask = np.zeros(max_rows, np.uint32)
        self.num_indexed: IntArray = np.zeros(max_rows, np.int32)

    def of_row(self, row: int) -> IntArray:
        """Return the slots of a row, for its NgramIndex."""
        return self._slots[row * self._num_slots : (row + 1) * self._num_slots]

    def join(self, row: int, index: NgramIndex) -> None:
        """From here on a row's tokens are added here."""
        self._mask[row] = index.mask
        self.num_indexed[row] = len(index.tokens)

    def leave(self, row: int, index: NgramIndex) -> None:
        """Tell a row's index what was added here."""
        index.follow(self._rows.tokens[row, len(index.tokens) : self.num_indexed.item(row)].tolist())

    def update(self, rows: RowArray) -> IntArray:
        """Add what has been committed since. Returns what NgramIndex.find does, for each row.

        The hash of n tokens that end at a position is that of n - 1 tokens that end one before it, times
        FACTOR, and the last token: so hashes of one size are made of those before for all positions at once.
        """
        ends = self._rows.num_tokens[rows]
        indexed = self.num_indexed[rows]
        num_new = int((ends - indexed).max(initial=0))
        first = ends - (num_new + MAX_NGRAM)
        at = first + np.arange(num_new + MAX_NGRAM, dtype=np.int32)[:, None]
        begin = rows * self._max_len
        # [tokens, rows]: slices of it are in one piece.
        seen = self._tokens[begin + np.maximum(at, 0)].view(np.uint32)
        slots = np.empty((num_new + 1, MAX_NGRAM, len(rows)), np.uint32)
        h = seen + np.uint32(EMPTY * FACTOR & 0xFFFFFFFF)  # of 32 bits, of which the mask takes the lowest
        slots[:, 0] = h[MAX_NGRAM - 1 :]
        for n in range(2, MAX_NGRAM + 1):
            h = h[:-1] * np.uint32(FACTOR)
            h += seen[n - 1 :]
            slots[:, n - 1] = h[MAX_NGRAM - n :]
        slots &= self._mask[rows]
        places = slots + rows * self._num_slots
        if num_new:
            self._store(places[:-1], at[MAX_NGRAM:], indexed)
            self.num_indexed[rows] = ends
        return self._longest(self._slots[places[-1]], seen[-MAX_NGRAM:].view(np.int32), begin)

    def _store(self, places: RowArray, at: IntArray, indexed: IntArray) -> None:
        """Note the positions; of several in one place the last one stays, as numpy writes them in order."""
        positions = np.broadcast_to(at[:, None], places.shape)
        if at[0].min(initial=MAX_NGRAM) >= MAX_NGRAM and (at[0] >= indexed).all():  # nearly always
            self._slots[places.reshape(-1)] = positions.reshape(-1)
        else:
            is_new = (positions >= indexed) & (positions >= SIZES)
            self._slots[places[is_new]] = positions[is_new]

    def _longest(self, found: IntArray, end: IntArray, begin: RowArray) -> IntArray:
        """Return of what the table has for each size, [MAX_NGRAM, rows], that of the longest which is a
        match; -1 where none is.
        """
        best = np.full(len(begin), -1, np.int32)
        left = np.arange(len(begin))
        for n in range(MAX_NGRAM, 0, -1):
            at = found[n - 1, left]
            is_there = at >= n
            if not is_there.any():
                continue
            those, at = left[is_there], at[is_there]
            before = begin[those] + at + np.arange(-n, 0)[:, None]
            is_match = (self._tokens[before] == end[-n:, those]).all(axis=0)
            best[those[is_match]] = at[is_match]
            left = left[best[left] < 0]
            if not len(left):
                break
        return best

    def following(self, rows: RowArray, at: IntArray, num_tokens: int) -> IntArray:
        """[num_tokens, rows] what followed there, as NgramIndex.following says it."""
        at = np.maximum(at, 0)
        period = self._rows.num_tokens[rows] - at
        further = np.arange(num_tokens, dtype=np.int32)[:, None] % period
        found: IntArray = self._tokens[rows * self._max_len + at + further]
        return found
