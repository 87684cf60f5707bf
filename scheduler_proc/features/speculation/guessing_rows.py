"""GuessingRows: speculation for many rows at once, as the RowGuesser of the step loop.

A row joins when it is first planned or committed together with others, and brings what its Speculation has
learnt. When it is planned or committed by itself again it leaves, and takes along what was learnt here.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from runtime.wire.format import BoolArray, IntArray
from scheduler_proc.core.guesses import Guesses
from scheduler_proc.core.row_columns import RowArray, all_of
from scheduler_proc.core.rows import Rows
from scheduler_proc.features.speculation.draft_length import DraftLength, DraftLengths
from scheduler_proc.features.speculation.ngram_index import LONG_RUN, MIN_RUN, NgramIndex
from scheduler_proc.features.speculation.ngram_table import NgramTable
from scheduler_proc.features.speculation.step_cost import StepCost

MIN_TOGETHER = 8
"""Number of guessing rows from which on they are handled together, about where it takes as long as one by
one.
"""
MOST_BEHIND = 8
"""Maximum number of tokens that a row's n-gram index may be behind while the row makes no guesses."""


class Member(Protocol):
    def join(self, upto_now: bool) -> None:
        """Call the guesser's `put` for the row. upto_now: with an index of all committed tokens; otherwise
        some may be missing.
        """


class GuessingRows:
    """RowGuesser for rows of requests that only use n-gram speculation."""

    def __init__(self, rows: Rows, cost: StepCost, min_together: int = MIN_TOGETHER) -> None:
        self._rows = rows
        self._cost = cost
        self._min_together = min_together
        self._ngrams = NgramTable(rows)
        self._lengths = DraftLengths(rows.max_rows)
        self._members: list[Member | None] = [None] * rows.max_rows
        self._is_here: BoolArray = np.zeros(rows.max_rows, np.bool_)
        self._most: IntArray = np.zeros(rows.max_rows, np.int32)
        self._found: IntArray = np.full(rows.max_rows, -1, np.int32)
        """Position of the token that is expected next after the indexed ones; -1: unknown."""
        self._num_foretold: IntArray = np.zeros(rows.max_rows, np.int32)
        """Number of tokens of each row that came in sequence as expected."""
        self._num_drafted: IntArray = np.zeros(rows.max_rows, np.int32)
        self._counts: IntArray = np.zeros(rows.max_rows, np.int32)
        """Number of guesses that each row is to make, from its last commit, and the bounds used for it."""
        self._counted_with: IntArray = np.zeros(rows.max_rows, np.int32)
        self._bounds = (-1, 0.0, 0.0)
        self._bounds_number = 0

    # -- members --------------------------------------------------------------------------------------------

    def slots_of(self, row: int) -> IntArray:
        """Return the memory for a row's NgramIndex."""
        return self._ngrams.of_row(row)

    def admit(self, row: int, member: Member) -> None:
        """Allow the row to be handled together with others until it is released."""
        self._members[row] = member
        self._rows.only_guesses[row] = True

    def put(self, row: int, most: int, length: DraftLength, index: NgramIndex, is_marked: bool) -> None:
        """Add a row. most: its maximum number of guesses in a step. is_marked: True if it must be planned
        after its commit.
        """
        self._is_here[row] = True
        self._most[row] = most
        self._lengths.put(row, length)
        self._ngrams.join(row, index)
        is_behind = len(index.tokens) < self._rows.num_tokens_of[row]
        self._found[row] = index.found if is_behind else index.look()
        self._num_foretold[row] = index.num_foretold
        self._num_drafted[row] = self._counted_with[row] = 0
        if is_marked:
            self._rows.plan_all_when_committed(np.array([row], np.intp), np.ones(1, np.bool_))

    def take_back(self, row: int, length: DraftLength, index: NgramIndex) -> int:
        """Remove a row. Copies what was learnt here into both objects. Returns how many of its guesses
        were verified.
        """
        self._is_here[row] = False
        self._lengths.give_back(row, length)
        self._ngrams.leave(row, index)
        index.resume(self._found.item(row), self._num_foretold.item(row))
        return self._num_drafted.item(row)

    def _gather(self, rows: RowArray, upto_now: bool) -> None:
        """Add those of the rows that are not here. upto_now: with an index up to now, else as of the step's
        planning.
        """
        is_here = self._is_here[rows]
        if not all_of(is_here):
            for row in rows[~is_here].tolist():
                member = self._members[row]
                assert member is not None
                member.join(upto_now)

    # -- in a step ------------------------------------------------------------------------------------------

    def choose(self, ready: RowArray) -> BoolArray | None:
        rows = self._rows
        chosen = rows.only_guesses[ready] & (rows.kv_len[ready] >= rows.num_given[ready])
        return chosen if np.count_nonzero(chosen) >= self._min_together else None

    def guess(self, rows: RowArray) -> Guesses:
        self._gather(rows, upto_now=True)
        columns = self._rows
        num_tokens = columns.num_tokens[rows]
        counts = np.minimum(self._num_drafts(rows), columns.max_len[rows] - num_tokens - 1)
        in_flight = columns.in_flight[rows]
        if np.count_nonzero(in_flight):
            counts[in_flight != 0] = 0
        is_behind = (self._ngrams.num_indexed[rows] < num_tokens) & (counts > 0)
        if np.count_nonzero(is_behind):
            behind = rows[is_behind]
            self._found[behind] = self._ngrams.update(behind)
        found = self._found[rows]
        counts[found < 0] = 0
        ids = self._ngrams.following(rows, found, int(counts.max(initial=0)))
        return Guesses(rows, counts, ids, columns.kv_len[rows])

    def note(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        self._gather(rows, upto_now=False)
        self._num_drafted[rows] += num_drafted
        is_right = num_accepted == num_drafted
        num_wrong = len(rows) - int(np.count_nonzero(is_right))
        self._cost.note_all_verified(int(num_accepted.sum()), num_wrong)
        is_foretold = is_right & (num_drafted > 0)
        some_are_foretold = bool(np.count_nonzero(is_foretold))
        if some_are_foretold:
            is_done = self._follow(rows, num_drafted, is_foretold)
            if all_of(is_done):
                return
            if np.count_nonzero(is_done):
                is_rest = ~is_done
                rows, num_drafted, num_accepted = rows[is_rest], num_drafted[is_rest], num_accepted[is_rest]
        else:
            self._num_foretold[rows] = 0
        self._lengths.note(rows, num_drafted, num_accepted)
        self._counted_with[rows] = 0  # the number was counted with older success rates
        was_right = num_accepted > 0
        is_wanted = was_right
        if not all_of(was_right):
            is_wanted = was_right | (self._num_drafts(rows) > 0)
        is_due = is_wanted
        if not all_of(is_wanted):
            num_behind = self._rows.num_tokens[rows] - self._ngrams.num_indexed[rows]
            is_due = is_wanted | (num_behind >= MOST_BEHIND)
        if all_of(is_due):
            found = self._look_for(rows, some_are_foretold)
        else:
            if np.count_nonzero(is_due):
                self._look_for(rows[is_due], some_are_foretold)
            found = self._found[rows]
        # After a right guess there is likely more to guess.
        self._rows.plan_all_when_committed(rows, was_right | (is_wanted & (found >= 0)))

    def _follow(self, rows: RowArray, num_drafted: IntArray, is_foretold: BoolArray) -> BoolArray:
        """Record whether the tokens of a step came as expected, as NgramIndex.follow does. Returns the rows
        for which they continue a long run; these need nothing more and keep their marks.

        is_foretold: the row made that many guesses and all were right. Here the token behind them is checked
        as well.
        """
        found, num_foretold = self._found[rows], self._num_foretold[rows]
        expected = found + num_drafted
        is_foretold &= self._ngrams.has_come(rows, expected)
        is_long: BoolArray = is_foretold & (num_foretold >= LONG_RUN)
        if all_of(is_long):
            self._found[rows] = expected + 1
            self._ngrams.pass_over(rows)
            return is_long
        self._found[rows] = np.where(is_foretold, expected + 1, found)
        self._num_foretold[rows] = (num_foretold + num_drafted + 1) * is_foretold
        if np.count_nonzero(is_long):
            self._ngrams.pass_over(rows[is_long])
        return is_long

    def _num_drafts(self, rows: RowArray) -> IntArray:
        """Return the number of guesses of each row: the one stored before, if nothing has changed since."""
        bounds = (self._cost.most, self._cost.bar, self._cost.least)
        if bounds != self._bounds:
            self._bounds = bounds
            self._bounds_number += 1
        if all_of(self._counted_with[rows] == self._bounds_number):
            return self._counts[rows]
        most, bar, least = bounds
        counts = self._lengths.num_drafts(rows, np.minimum(self._most[rows], most), bar, least)
        self._counts[rows], self._counted_with[rows] = counts, self._bounds_number
        return counts

    def _look_for(self, rows: RowArray, may_be_followed: bool) -> IntArray:
        found = self._ngrams.update(rows)
        if may_be_followed:
            found = np.where(self._num_foretold[rows] >= MIN_RUN, self._found[rows], found)
        self._found[rows] = found
        return found
