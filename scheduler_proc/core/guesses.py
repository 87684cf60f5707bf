"""Guesses of rows to which nothing else is attached, made, planned and committed for all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.wire.format import BoolArray, IntArray
from scheduler_proc.core.row_columns import RowArray, RowColumns, all_of


@dataclass(slots=True, eq=False)
class Guesses:
    """Rows of one step that compute their next token and verify guesses, maybe none."""

    rows: RowArray
    counts: IntArray
    """Number [n] of guesses of each row."""
    ids: IntArray
    """Guesses [most, n]; of each row the first ones count."""
    starts: IntArray
    """Position [n] of the token before the guesses."""

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def cut_to(self, room: int) -> int:
        """Keep so many in all: those of the first rows. Returns how many there are then."""
        total = self.total
        if total <= room:
            return total
        before = np.cumsum(self.counts) - self.counts
        np.clip(room - before, 0, self.counts, out=self.counts)
        return room

    def input_ids(self, rows: RowColumns, unknown: int) -> bytes:
        """Packed [n + total]: of each row the next token, then its guesses."""
        ids = np.empty((len(self.rows), 1 + len(self.ids)), np.int32)
        ids[:, 0] = rows.next_ids(self.rows, unknown)
        ids[:, 1:] = self.ids.T
        if all_of(self.counts == len(self.ids)):
            return ids.tobytes()
        return ids[np.arange(ids.shape[1], dtype=np.int32) <= self.counts[:, None]].tobytes()


class GuessLane(Protocol):
    """Makes guesses for many rows at once, and learns from what became of them."""

    def choose(self, ready: RowArray) -> BoolArray | None:
        """[n] which of the ready rows are planned together; None where they are too few for that."""

    def guess(self, rows: RowArray) -> Guesses:
        """Guess for these rows, which have room for the next token."""

    def note(self, rows: RowArray, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """A step is committed: so many guesses of each row were verified, and right."""
