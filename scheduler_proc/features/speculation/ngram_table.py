"""NgramTable: the n-gram indexes of many rows at once, over the tokens in the row columns."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from runtime.wire.format import BoolArray, IntArray
from scheduler_proc.core.row_columns import RowArray, RowColumns, all_of
from scheduler_proc.features.speculation.ngram_index import (
    EMPTY,
    FACTOR,
    MAX_NGRAM,
    MAX_SLOTS,
    SLOTS_A_TOKEN,
    NgramIndex,
)

MAX_ALL_SLOTS = 1 << 28
"""Maximum number of slots of all rows together: 1 GiB of addresses. Memory is used only as rows write to it.
"""
LINE = 16
"""Slots between those of two rows: a cache line of 64 bytes. Without the gap, n-grams that rows have in
common, such as those of a system prompt, would be at addresses that differ by a power of two, and a cache
holds only a few of those.
"""
SIZES = np.arange(1, MAX_NGRAM + 1, dtype=np.int32)[:, None]
BITS = 0xFFFFFFFF
POWERS = np.array([FACTOR**n & BITS for n in range(MAX_NGRAM)], np.uint32)[:, None, None]
MORE = np.uint32(EMPTY * (FACTOR - 1) & BITS)
"""Contribution of EMPTY to the hash of an n-gram for each of its tokens; EMPTY itself is the rest."""
BACK = np.arange(1, MAX_NGRAM + 1)[:, None]
ALL_SAME = np.ones(MAX_NGRAM, np.bool_).view(np.uint64)
"""Flags of all tokens of an n-gram as a single number."""
assert len(ALL_SAME) == 1


class NgramTable:
    """Hash table slots for every row. They are those of the row's NgramIndex, which may read and write them
    only while the row is not here. When the row leaves, the index gets the new tokens.
    """

    def __init__(self, rows: RowColumns) -> None:
        """rows: row columns, with room for at least MAX_NGRAM tokens."""
        max_rows, max_len = rows.tokens.shape
        assert max_len >= MAX_NGRAM
        num_slots = 1 << (SLOTS_A_TOKEN * max_len - 1).bit_length()
        most = 1 << (MAX_ALL_SLOTS // max_rows).bit_length() - 1
        self._num_slots = min(num_slots, MAX_SLOTS, most)
        self._stride = self._num_slots + LINE
        self._slots = np.zeros(max_rows * self._stride, np.int32)
        self._first = np.arange(max_rows, dtype=np.uint32) * np.uint32(self._stride)
        self._rows = rows
        self._tokens = rows.tokens.reshape(-1)
        self._max_len = max_len
        self._mask = np.zeros(max_rows, np.uint32)
        self.num_indexed: IntArray = np.zeros(max_rows, np.int32)
        self._num_passed: IntArray = np.zeros(max_rows, np.int32)
        """Number of first tokens of each row among which some may not be in the table; none of them is added
        again.
        """
        self._has_passed = False

    def of_row(self, row: int) -> IntArray:
        """Return the slots of a row, for its NgramIndex."""
        return self._slots[row * self._stride :][: self._num_slots]

    def join(self, row: int, index: NgramIndex) -> None:
        """Take over a row: from now on its tokens are added here."""
        self._mask[row] = index.mask
        self.num_indexed[row], self._num_passed[row] = len(index.tokens), index.num_passed
        self._has_passed |= index.num_passed > 0

    def leave(self, row: int, index: NgramIndex) -> None:
        """Hand a row back to its index, with the state after what was added here."""
        index.pass_over(self._rows.tokens[row, len(index.tokens) : self.num_indexed.item(row)].tolist())

    def update(self, rows: RowArray) -> IntArray:
        """Add the tokens that were committed since the last call. Returns [n] the result of NgramIndex.find
        for each row.
        """
        ends = self._rows.num_tokens[rows]
        num_new = int((ends - self.num_indexed[rows]).max(initial=0))
        begin = rows * self._max_len
        are_long = not np.count_nonzero(ends < num_new + MAX_NGRAM)  # nearly always
        if are_long:
            seen = self._pieces_of(num_new + MAX_NGRAM, begin + ends).T
        else:
            back = np.arange(-num_new - MAX_NGRAM, 0)[:, None]
            seen = self._tokens.take(begin + ends + back, mode="clip")
        places = self._places(rows, seen)
        if num_new:
            at = np.repeat(ends + np.arange(-num_new, 0, dtype=np.int32)[:, None], MAX_NGRAM, axis=0)
            if self._has_passed:
                self._leave_out_passed(places, at, rows, ends - num_new)
            self._store(places[:-MAX_NGRAM], at, are_long)
            self.num_indexed[rows] = ends
        return self._longest(places[-MAX_NGRAM:], seen[-MAX_NGRAM:], begin)

    def _pieces_of(self, num_tokens: int, ends: RowArray) -> IntArray:
        """Return [rows, num_tokens] the tokens before each of these positions."""
        pieces = self._rows.pieces(num_tokens)[ends - num_tokens]
        return pieces.view(np.int32).reshape(-1, num_tokens)

    def _places(self, rows: RowArray, seen: IntArray) -> RowArray:
        """Return [positions * MAX_NGRAM, rows] slots of the n-grams that end at each of these tokens but the
        first MAX_NGRAM - 1. The hash of n + 1 tokens is that of n tokens plus FACTOR^n times the token before
        them.
        """
        num_positions, num_rows = len(seen) - MAX_NGRAM + 1, len(rows)
        # Products have 32 bits, of which the mask takes the lowest.
        tokens = np.add(seen.view(np.uint32), MORE, order="C")
        of_row, of_token, token = 4, 4 * num_rows, (MAX_NGRAM - 1) * 4 * num_rows
        shape, strides = (MAX_NGRAM, num_positions, num_rows), (-of_token, of_token, of_row)
        # [size, position, row] the token that an n-gram of this size has and a shorter one has not
        hashes = np.ndarray(shape, np.uint32, tokens, token, strides) * POWERS
        by_size = list(hashes)
        by_size[0] += np.uint32(EMPTY)
        for shorter, longer in pairwise(by_size):
            longer += shorter
        hashes &= self._mask[rows]
        hashes += self._first[rows]
        return hashes.transpose(1, 0, 2).astype(np.intp, "C").reshape(-1, num_rows)

    def _leave_out_passed(self, places: RowArray, at: IntArray, rows: RowArray, first: IntArray) -> None:
        """Redirect skipped positions of rows with fewer new tokens to slots behind those of the first row,
        which nobody reads. first: first position of each row that is added.
        """
        passed = self._num_passed[rows]
        late = (passed > first).nonzero()[0]
        if len(late):
            theirs = places[: len(at), late]
            theirs[at[:, late] < passed[late]] = self._num_slots
            places[: len(at), late] = theirs

    def _store(self, places: RowArray, at: IntArray, are_long: bool) -> None:
        """Write the positions into the slots. If several go to one slot the last one stays, because numpy
        writes in order. Rows with fewer new tokens have some written twice, which changes nothing, since
        everything behind them is written again, too.
        """
        if are_long:
            self._slots[places.reshape(-1)] = at.reshape(-1)
        else:
            is_ngram = at >= np.tile(SIZES, (len(at) // MAX_NGRAM, 1))
            self._slots[places[is_ngram]] = at[is_ngram]

    def _longest(self, places: RowArray, end: IntArray, begin: RowArray) -> IntArray:
        """Return, from the slots [MAX_NGRAM, rows] of each size, the position for the longest n-gram that
        matches the end; -1 where none does.
        """
        at: IntArray = self._slots[places[-1]]
        there = self._pieces_of(MAX_NGRAM, begin + np.maximum(at, MAX_NGRAM))
        is_match = ((there == end.T).view(np.uint64) == ALL_SAME).reshape(-1)
        is_match &= at >= MAX_NGRAM
        if all_of(is_match):
            return at
        found = self._slots[places]
        best: IntArray = np.where(is_match, at, np.int32(-1))
        left = np.flatnonzero(~is_match)
        is_likely = (found >= SIZES)[:, left]
        is_likely[-1] = False
        is_likely &= self._tokens.take(begin[left] + found[:, left] - 1, mode="clip") == end[-1, left]
        while True:
            sizes = (is_likely * SIZES).max(axis=0)
            is_left = sizes > 0
            if not all_of(is_left):
                left, sizes, is_likely = left[is_left], sizes[is_left], is_likely[:, is_left]
            if not len(left):
                return best
            at = found[sizes - 1, left]
            is_same = self._tokens.take(begin[left] + at - BACK, mode="clip") == end[::-1, left]
            is_match = (is_same | (sizes < BACK)).all(axis=0)
            best[left[is_match]] = at[is_match]
            is_likely[:, is_match] = False
            is_likely[sizes - 1, np.arange(len(left))] = False

    def has_come(self, rows: RowArray, at: IntArray) -> BoolArray:
        """Return a mask [n]: True if the last token of the row equals the token at position `at` [n]."""
        begin = rows * self._max_len
        same: BoolArray = self._tokens[begin + at] == self._tokens[begin + self._rows.num_tokens[rows] - 1]
        return same

    def pass_over(self, rows: RowArray) -> None:
        """Treat the tokens committed since the last call as ones whose n-grams are in the table already."""
        self.num_indexed[rows] = self._num_passed[rows] = self._rows.num_tokens[rows]
        self._has_passed = True

    def following(self, rows: RowArray, at: IntArray, num_tokens: int) -> IntArray:
        """Return [num_tokens, rows] tokens from position `at` on, as NgramIndex.following; arbitrary where
        `at` is -1.
        """
        further = np.arange(num_tokens, dtype=np.int32)[:, None]
        period = self._rows.num_tokens[rows] - at
        if period.min(initial=num_tokens) < num_tokens:
            further = further % period
        found: IntArray = self._tokens[rows * self._max_len + at + further]
        return found
