"""Guesses of speculative decoding for rows without other features: made, planned and committed for all such
rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.wire.format import BoolArray, IntArray
from scheduler_proc.core.row_columns import RowArray, RowColumns, all_of


@dataclass(slots=True, eq=False)
class Guesses:
    """Rows of one step that compute their next token and verify guesses, possibly none."""

    rows: RowArray
    counts: IntArray
    """Number [n] of guesses of each row."""
    ids: IntArray
    """Guessed ids [max_guesses, n]; the first `counts[i]` of column i are valid."""
    starts: IntArray
    """Position [n] of the token before each row's guesses."""

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def cut_to(self, room: int) -> int:
        """Keep at most `room` guesses in total, those of the first rows. Returns how many remain."""
        total = self.total
        if total <= room:
            return total
        before = np.cumsum(self.counts) - self.counts
        np.clip(room - before, 0, self.counts, out=self.counts)
        return room

    def input_ids(self, rows: RowColumns, unknown: int) -> bytes:
        """Return packed input ids [n + total]: for each row its next token, then its guesses."""
        ids = np.empty((len(self.rows), 1 + len(self.ids)), np.int32)
        ids[:, 0] = rows.next_ids(self.rows, unknown)
        ids[:, 1:] = self.ids.T
        if all_of(self.counts == len(self.ids)):
            return ids.tobytes()
        return ids[np.arange(ids.shape[1], dtype=np.int32) <= self.counts[:, None]].tobytes()


class RowGuesser(Protocol):
    """Makes guesses for many rows at once, and learns from the results."""

    def choose(self, ready: RowArray) -> BoolArray | None:
        """Return a mask [n] of the ready rows that are planned together; None if there are too few."""

    def guess(self, rows: RowArray) -> Guesses:
        """Return guesses for these rows, which have room for their next token."""

    def note(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """Record for each row of a committed step how many guesses were verified and how many
        were accepted.
        """
