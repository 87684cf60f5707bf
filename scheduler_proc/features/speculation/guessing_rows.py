"""GuessingRows: Speculation of many rows at once, as the GuessLane of the step loop.

A row joins when it is first planned or committed with the others, and what its Speculation has learnt comes
with it; it leaves with what was learnt here when it is planned or committed alone again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from runtime.wire.format import BoolArray, IntArray
from scheduler_proc.core.guesses import Guesses
from scheduler_proc.core.row_columns import RowArray, all_of
from scheduler_proc.core.rows import Rows
from scheduler_proc.features.speculation.draft_length import DraftLength, DraftLengths
from scheduler_proc.features.speculation.ngram_index import NgramIndex
from scheduler_proc.features.speculation.ngram_table import NgramTable
from scheduler_proc.features.speculation.step_cost import StepCost

MIN_TOGETHER = 8
"""Rows that guess, from which on they are taken together: about where it takes as long as one by one."""
MOST_BEHIND = 8
"""Tokens that a row's n-grams may lack while it makes no guesses."""


class Member(Protocol):
    def join(self) -> None:
        """Call `put` of the lane."""


class GuessingRows:
    """Lane of the rows of a launch whose requests look for n-grams and want nothing else."""

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
        """Position of what may follow the tokens that are indexed; -1: nothing is known that does."""
        self._num_drafted: IntArray = np.zeros(rows.max_rows, np.int32)
        self._counts: IntArray = np.zeros(rows.max_rows, np.int32)
        """Guesses to make, as was said when the rows were committed last, with the bounds of that number."""
        self._counted_with: IntArray = np.zeros(rows.max_rows, np.int32)
        self._bounds = (-1, 0.0, 0.0)
        self._bounds_number = 0

    # -- who is here ----------------------------------------------------------------------------------------

    def slots_of(self, row: int) -> IntArray:
        """Return the memory for a row's NgramIndex."""
        return self._ngrams.of_row(row)

    def admit(self, row: int, member: Member) -> None:
        """The row may be taken together with others until it is given back."""
        self._members[row] = member
        self._rows.only_guesses[row] = True

    def put(self, row: int, most: int, length: DraftLength, index: NgramIndex, is_marked: bool) -> None:
        """A row joins: guesses in a step at most, what it has learnt, where it has looked, and whether it is
        to be planned when its tokens are here.
        """
        self._is_here[row] = True
        self._most[row] = most
        self._lengths.put(row, length)
        self._ngrams.join(row, index)
        self._found[row] = index.find()
        self._num_drafted[row] = self._counted_with[row] = 0
        if is_marked:
            self._rows.plan_all_when_committed(np.array([row], np.intp), np.ones(1, np.bool_))

    def take_back(self, row: int, length: DraftLength, index: NgramIndex) -> int:
        """A row leaves. Tells the two what was learnt here; returns how many of its guesses were verified."""
        self._is_here[row] = False
        self._lengths.give_back(row, length)
        self._ngrams.leave(row, index)
        return self._num_drafted.item(row)

    def _gather(self, rows: RowArray) -> None:
        """Have those join that are not here."""
        is_here = self._is_here[rows]
        if not all_of(is_here):
            for row in rows[~is_here].tolist():
                member = self._members[row]
                assert member is not None
                member.join()

    # -- in a step ------------------------------------------------------------------------------------------

    def choose(self, ready: RowArray) -> BoolArray | None:
        rows = self._rows
        chosen = rows.only_guesses[ready] & (rows.kv_len[ready] >= rows.num_given[ready])
        return chosen if np.count_nonzero(chosen) >= self._min_together else None

    def guess(self, rows: RowArray) -> Guesses:
        self._gather(rows)
        columns = self._rows
        num_tokens = columns.num_tokens[rows]
        counts = np.minimum(self._num_drafts(rows), columns.max_len[rows] - num_tokens - 1)
        counts[columns.in_flight[rows] != 0] = 0
        is_behind = (self._ngrams.num_indexed[rows] < num_tokens) & (counts > 0)
        if np.count_nonzero(is_behind):
            self._look_for(rows[is_behind])
        found = self._found[rows]
        counts[found < 0] = 0
        ids = self._ngrams.following(rows, found, int(counts.max(initial=0)))
        return Guesses(rows, counts, ids, columns.kv_len[rows])

    def note(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        self._gather(rows)
        self._num_drafted[rows] += num_drafted
        num_wrong = int(np.count_nonzero(num_accepted < num_drafted))
        self._cost.note_all_verified(int(num_accepted.sum()), num_wrong)
        self._lengths.note(rows, num_drafted, num_accepted)
        self._counted_with[rows] = 0  # what they have learnt makes it another number
        was_right = num_accepted > 0
        is_wanted = was_right
        if not all_of(was_right):
            is_wanted = was_right | (self._num_drafts(rows) > 0)
        is_due = is_wanted
        if not all_of(is_wanted):
            num_behind = self._rows.num_tokens[rows] - self._ngrams.num_indexed[rows]
            is_due = is_wanted | (num_behind >= MOST_BEHIND)
        if all_of(is_due):
            found = self._look_for(rows)
        else:
            if np.count_nonzero(is_due):
                self._look_for(rows[is_due])
            found = self._found[rows]
        # Where one was right there is likely more to guess.
        self._rows.plan_all_when_committed(rows, was_right | (is_wanted & (found >= 0)))

    def _num_drafts(self, rows: RowArray) -> IntArray:
        """Say how many guesses each row makes: as it was said last, while nothing has changed since."""
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

    def _look_for(self, rows: RowArray) -> IntArray:
        found = self._found[rows] = self._ngrams.update(rows)
        return found
