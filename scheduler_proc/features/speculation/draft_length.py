"""DraftLength: chooses how many guesses a row makes, from how often its last ones were right. DraftLengths
does the same for many rows at once.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.wire.format import BoolArray, IntArray
from scheduler_proc.core.row_columns import RowArray, all_of

Rates: TypeAlias = npt.NDArray[np.float64]

FIRST_RATE = 0.5
"""Probability that a guess is right, assumed before any was verified."""
WEIGHT = 0.25
"""Weight of the newest guess in a row's estimate, after its first few."""
FIRST_WEIGHT = 0.5
"""Weight of a row's very first guess in its estimate. It is high because other requests say little about this
one.
"""
FIRST_DRAFTS = 2
"""Maximum number of guesses in a row's first step with guesses."""
WEIGHT_FOR_ALL = 0.02
"""Weight of the newest guess in the estimate with which new requests begin."""
SHORTEST_PAUSE = 8
LONGEST_PAUSE = 256
"""Maximum number of steps without guesses before one is tried again, where guesses cost no more than
LOWEST_BAR. Where they cost more the pause is longer in proportion, so that the trials of rows that are never
right take the same share of time.
"""
LOWEST_BAR = 0.1
"""Least probability of being right that a guess must have, however little it costs."""


class DraftLength:
    """Number of guesses of one row. A guess counts only if all before it were right, so the j-th has the
    probability rate^j. A row whose guesses are not worth their cost makes none for some steps, then one, then
    pauses longer, and so on.
    """

    __slots__ = ("is_known", "pause", "rate", "wait")

    def __init__(self, rate: float = FIRST_RATE) -> None:
        self.rate = rate
        self.is_known = False
        """True if some of the row's own guesses were verified."""
        self.pause = SHORTEST_PAUSE
        self.wait = SHORTEST_PAUSE

    def num_drafts(self, most: int, bar: float, least: float = 0.0) -> int:
        """Return how many guesses to make: those whose probability is at least `bar`, up to `most`, or none
        if fewer than `least` right ones are expected. The first guesses are few, and made in order to learn.
        """
        rate = likely = self.rate
        expected, count = 0.0, 0
        if not self.is_known:
            most, least = min(most, FIRST_DRAFTS), 0.0
        while count < most and likely >= bar:
            count += 1
            expected += likely
            likely *= rate
        if expected < least:
            count = 0
        if count or bar >= 1.0:  # at such a bar not even a sure guess is worth it
            return count
        is_over = LOWEST_BAR * (self.pause - self.wait) >= bar * self.pause
        return min(1, most) if is_over and self.wait <= 0 else 0

    def note_verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step that verified guesses. Guesses behind the first wrong one say nothing."""
        weight = WEIGHT if self.is_known else FIRST_WEIGHT
        self.rate = rate_after(self.rate, num_drafted, num_accepted, weight)
        self.is_known = True
        if self.wait <= 0:
            self.pause = SHORTEST_PAUSE if num_accepted else min(2 * self.pause, LONGEST_PAUSE)
            self.wait = self.pause

    def note_without(self) -> None:
        """Count a step without guesses towards the pause."""
        self.wait -= 1


def rate_after(rate: float, num_drafted: int, num_accepted: int, weight: float) -> float:
    """Return the new estimate after num_drafted guesses of which the first num_accepted were right."""
    keep = 1.0 - weight
    rate = 1.0 - (1.0 - rate) * keep**num_accepted
    return rate if num_accepted == num_drafted else rate * keep


def powers(keep: float) -> Rates:
    """Return [MAX_DRAFT_TOKENS + 1] powers of `keep`: the share of an estimate that remains after 0, 1, ...
    right guesses.
    """
    return np.array([keep**n for n in range(MAX_DRAFT_TOKENS + 1)])


KEPT, KEPT_FIRST = powers(1.0 - WEIGHT), powers(1.0 - FIRST_WEIGHT)


class DraftLengths:
    """State of the DraftLength of every row, in columns, so that many rows learn at once."""

    def __init__(self, max_rows: int) -> None:
        self._rate: Rates = np.zeros(max_rows)
        self._is_known: BoolArray = np.zeros(max_rows, np.bool_)
        self._pause: IntArray = np.zeros(max_rows, np.int32)
        self._wait: IntArray = np.zeros(max_rows, np.int32)

    def put(self, row: int, length: DraftLength) -> None:
        self._rate[row], self._is_known[row] = length.rate, length.is_known
        self._pause[row], self._wait[row] = length.pause, length.wait

    def give_back(self, row: int, length: DraftLength) -> None:
        length.rate, length.is_known = self._rate.item(row), self._is_known.item(row)
        length.pause, length.wait = self._pause.item(row), self._wait.item(row)

    def num_drafts(self, rows: RowArray, most: IntArray, bar: float, least: float) -> IntArray:
        """Return the number of guesses [n] of each row, as DraftLength.num_drafts, with a `most` [n] for
        each.
        """
        is_known = self._is_known[rows]
        limit = most if all_of(is_known) else np.where(is_known, most, np.minimum(most, FIRST_DRAFTS))
        rate = self._rate[rows]
        likely = np.empty((int(limit.max(initial=0)), len(rows)))
        likely[:1] = rate
        for at in range(1, len(likely)):
            np.multiply(likely[at - 1], rate, out=likely[at])
        # A guess is at most as likely as the one before it.
        count = np.add.reduce((likely >= bar).view(np.int8), axis=0, dtype=np.int8)
        count = np.minimum(count, limit)
        if least > 0.0:
            counted = np.arange(len(likely))[:, None] < count
            count[is_known & ((likely * counted).sum(axis=0) < least)] = 0
        if bar < 1.0:
            wait = self._wait[rows]
            tries = (count == 0) & (wait <= 0)
            if np.count_nonzero(tries):
                pause = self._pause[rows]
                tries &= LOWEST_BAR * (pause - wait) >= bar * pause
                count[tries] = np.minimum(1, most[tries])
        return count

    def note(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """Learn from a step. num_drafted [n]: guesses of each row that were verified; 0: it made none."""
        has_drafted = num_drafted > 0
        if not all_of(has_drafted):
            without = rows[~has_drafted]
            self._wait[without] -= 1
            rows, num_drafted, num_accepted = (
                rows[has_drafted],
                num_drafted[has_drafted],
                num_accepted[has_drafted],
            )
            if not len(rows):
                return
        is_known, rate = self._is_known[rows], self._rate[rows]
        kept = KEPT[num_accepted]
        wrong = 1.0 - WEIGHT
        if not all_of(is_known):
            kept = np.where(is_known, kept, KEPT_FIRST[num_accepted])
            wrong = np.where(is_known, wrong, 1.0 - FIRST_WEIGHT)  # type: ignore[assignment]
            self._is_known[rows] = True
        rate = 1.0 - (1.0 - rate) * kept
        self._rate[rows] = np.where(num_accepted == num_drafted, rate, rate * wrong)
        has_waited = self._wait[rows] <= 0
        if np.count_nonzero(has_waited):
            those, was_right = rows[has_waited], num_accepted[has_waited] > 0
            longer = np.minimum(2 * self._pause[those], LONGEST_PAUSE)
            self._pause[those] = np.where(was_right, SHORTEST_PAUSE, longer)
            self._wait[those] = self._pause[those]
