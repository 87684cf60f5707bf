"""RowColumns: the hot state of every request that runs, one numpy column per fact, indexed by row.

A fact is in a column while its request holds a row, and on the request otherwise. Methods that take an array
of rows are the decode path: their cost depends neither on sequence length nor on rows that nobody holds.
Knows nothing of pages or of requests; `Rows` says who holds which row.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.wire.format import TOKEN_BYTES, BoolArray, IntArray

MAX_STOP_IDS = 4
"""Most stop ids that fit the columns; a request with more is looked at one token at a time."""

RowArray: TypeAlias = npt.NDArray[np.intp]
StayArray: TypeAlias = npt.NDArray[np.int64]


def all_of(flags: BoolArray) -> bool:
    """Tell whether all of [n] are true: a search of their bytes, which takes a fifteenth of the time that the
    method `all` does for the rows of a step.
    """
    return 0 not in flags.tobytes()


class RowColumns:
    """Columns of all rows. `max_len` bounds the tokens of one request, prompt and output together."""

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.max_rows = max_rows
        # Prompt and committed output.
        self.tokens: IntArray = np.zeros((max_rows, max_len), np.int32)
        # The same memory, all rows one behind the other: a request's tokens go in and out as bytes, which
        # numpy takes three times as long for.
        self._token_bytes = memoryview(self.tokens.data).cast("B")
        self._row_bytes = max_len * TOKEN_BYTES
        self.num_tokens: IntArray = np.zeros(max_rows, np.int32)
        # Tokens that the request came to its row with: to compute these is prefill.
        self.num_given: IntArray = np.zeros(max_rows, np.int32)
        # num_tokens at which the request ends, and the position below which no stop id ends it.
        self.max_len: IntArray = np.zeros(max_rows, np.int32)
        self.min_len: IntArray = np.zeros(max_rows, np.int32)
        # Tokens whose KV is written by launched plans, and tokens sampled by them but not yet committed.
        self.kv_len: IntArray = np.zeros(max_rows, np.int32)
        self.in_flight: IntArray = np.zeros(max_rows, np.int32)
        self.stop_ids: IntArray = np.full((MAX_STOP_IDS, max_rows), -1, np.int32)
        # So many of them, the first ones, were ever used: the others are not looked at.
        self.num_stop_columns = 1
        # Has features, or too many stop ids for the columns: never a plain decode.
        self.needs_python: BoolArray = np.zeros(max_rows, np.bool_)
        # Nothing is attached to it but guesses that are made and verified for many rows at once: GuessLane.
        self.only_guesses: BoolArray = np.zeros(max_rows, np.bool_)
        # Guesses of this stay that were right.
        self.num_accepted: IntArray = np.zeros(max_rows, np.int32)
        self.urgency: IntArray = np.zeros(max_rows, np.int32)
        self.handle: npt.NDArray[np.void] = np.zeros(max_rows, "V16")
        # Rows that are decoded plainly though their requests have features, and of their last tokens, if any
        # was: when it was here, and by which step.
        self.timed: set[int] = set()
        self.token_s: npt.NDArray[np.float64] = np.zeros(max_rows, np.float64)
        self.token_step: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # Number of this stay, never used twice; 0: nobody holds the row.
        self.stay: StayArray = np.zeros(max_rows, np.int64)
        self._running: RowArray | None = None
        self._planned_when_committed: set[tuple[int, Hashable]] = set()
        # The same mark, of rows whose guesses are made for many at once.
        self._guesses_when_committed: BoolArray = np.zeros(max_rows, np.bool_)
        self._has_marked_many = False
        self._pieces: dict[int, npt.NDArray[np.void]] = {}

    @property
    def running(self) -> RowArray:
        """Return the rows that are held, in the order of admission. Recomputed only after somebody came or
        went.
        """
        if self._running is None:
            held = np.flatnonzero(self.stay)
            self._running = held[np.argsort(self.stay[held])]
        return self._running

    def still_held(self, rows: RowArray, stays: StayArray) -> BoolArray:
        """Return which of the rows are in the same hands as when a step was planned."""
        held: BoolArray = self.stay[rows] == stays
        return held

    def plan_when_committed(self, row: int, wanted: bool, owner: Hashable) -> None:
        """Have the row planned when its tokens are here, and not while one of them is in flight; or let it
        overlap again, for all that this owner wants. Holds until the row is given back.
        """
        if wanted:
            self._planned_when_committed.add((row, owner))
        else:
            self._planned_when_committed.discard((row, owner))

    def plan_all_when_committed(self, rows: RowArray, wanted: BoolArray) -> None:
        """The same for what the GuessLane wants of several rows."""
        self._guesses_when_committed[rows] = wanted
        self._has_marked_many = True

    def is_planned_when_committed(self, row: int) -> bool:
        """Tell whether somebody wants the row to be planned when its tokens are here."""
        return self._guesses_when_committed.item(row) or any(
            row == wanted for wanted, _ in self._planned_when_committed
        )

    @property
    def must_commit_first(self) -> bool:
        """Tell whether a row that is planned when its tokens are here has one in flight."""
        rows = self._planned_when_committed
        if rows and any(self.in_flight.item(row) for row, _ in rows):
            return True
        if not self._has_marked_many:
            return False
        marked = self._guesses_when_committed.nonzero()[0]
        self._has_marked_many = len(marked) > 0
        return bool(np.count_nonzero(self.in_flight[marked]))

    def packed(self, row: int, start: int, end: int) -> memoryview:
        """Return a view of the packed tokens of a row from one place up to another."""
        at = row * self._row_bytes
        return self._token_bytes[at + start * TOKEN_BYTES : at + end * TOKEN_BYTES]

    def append(self, row: int, tokens: list[int]) -> int:
        """Commit what one sample gave a single row. Returns how many tokens it has now."""
        start, n = self.num_tokens.item(row), len(tokens)
        self.tokens[row, start : start + n] = tokens if n > 1 else tokens[0]
        self.num_tokens[row] = start + n
        self.in_flight[row] = self.in_flight.item(row) - 1  # `-= 1` takes three times as long
        return start + n

    def last_time(self, row: int) -> tuple[float, int] | None:
        """Return when the last token of a row came, and the number of its step, also of one that has just
        been given back; None where it came to the row's features.
        """
        step = self.token_step.item(row)
        return (self.token_s.item(row), step) if step else None

    def pieces(self, num_tokens: int) -> npt.NDArray[np.void]:
        """Return the tokens of all rows, one row behind the other, as pieces of so many, one from each token
        on. To read or write a piece takes an eighth of the time that its tokens take one by one.
        """
        pieces = self._pieces.get(num_tokens)
        if pieces is None:
            num_pieces = self.tokens.size - num_tokens + 1
            pieces = np.ndarray((num_pieces,), f"V{4 * num_tokens}", self.tokens, strides=(4,))
            self._pieces[num_tokens] = pieces
        return pieces

    # -- the decode path ------------------------------------------------------------------------------------

    def ready(self, feeds_back: bool) -> RowArray:
        """Return the rows whose next input is known, on the host or (feeds_back) on the device, and that may
        still produce.
        """
        rows = self.running
        in_flight = self.in_flight[rows]
        predicted = self.num_tokens[rows] + in_flight
        ready = (predicted > self.kv_len[rows]) & (predicted < self.max_len[rows])
        if not feeds_back:
            ready &= in_flight == 0
        return rows if all_of(ready) else rows[ready]

    def plain_decodes(self, rows: RowArray) -> BoolArray:
        """Return which of these ready rows are past their prefill, with nothing attached: each computes
        exactly one token.
        """
        plain: BoolArray = (self.kv_len[rows] >= self.num_given[rows]) & ~self.needs_python[rows]
        return plain

    def next_ids(self, rows: RowArray, unknown: int) -> IntArray:
        """Return [n] int32: the one id that each of these decodes reads; `unknown` where only the device has
        it.
        """
        known = self.tokens[rows, self.kv_len[rows]]
        known[self.in_flight[rows] != 0] = unknown
        return known

    def count_as_launched(
        self, rows: RowArray, lens: IntArray | int = 1, samples: IntArray | int = 1
    ) -> None:
        """Count that a plan computes so many tokens of each row and samples so many times (0 or 1)."""
        self.kv_len[rows] += lens
        self.in_flight[rows] += samples

    def note_time(self, rows: RowArray, now_s: float, step: int) -> None:
        """Their tokens of a step are here. Called while there are `timed` rows."""
        self.token_s[rows] = now_s
        self.token_step[rows] = step

    def append_one(self, rows: RowArray, tokens: IntArray) -> tuple[RowArray, BoolArray]:
        """Commit one sampled token to each row. Returns the rows that end, and whether by a stop id."""
        at = self.num_tokens[rows]
        self.tokens[rows, at] = tokens
        at += 1
        self.num_tokens[rows] = at
        self.in_flight[rows] -= 1
        ended = at >= self.max_len[rows]
        is_stop_id: BoolArray = self.stop_ids[: self.num_stop_columns, rows] == tokens
        stopped = is_stop_id[0]
        if np.count_nonzero(is_stop_id):
            stopped = is_stop_id.any(axis=0) & (at > self.min_len[rows])
            ended |= stopped
        places = ended.nonzero()[0]
        return rows[places], stopped[places]

    def append_several(
        self, rows: RowArray, tokens: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray, BoolArray, BoolArray]:
        """Commit so many sampled tokens to each row, one at least, [sum(counts)] in their order; without
        those behind a stop id or the length limit. Returns how many were kept of each row, these tokens,
        which rows end, and which of these by a stop id.
        """
        at, most = self.num_tokens[rows], self.max_len[rows]
        kept, stopped = np.minimum(counts, most - at), np.zeros(len(rows), np.bool_)
        if not self._put_as_many(rows, at, tokens, kept):
            tokens = self._put_kept(rows, tokens, counts, kept, stopped)
        at += kept
        self.num_tokens[rows] = at
        self.in_flight[rows] -= 1
        return kept, tokens, stopped | (at >= most), stopped

    def _put_as_many(self, rows: RowArray, at: IntArray, tokens: IntArray, kept: IntArray) -> bool:
        """Write the tokens of rows that have got as many each. False, and nothing is written, where one has
        got another number, or a stop id is among them.
        """
        num_rows = len(rows)
        num_each, rest = divmod(len(tokens), num_rows)
        # None has more kept than it has got, so with these sums all have got so many.
        if rest or not all_of(kept == num_each):
            return False
        is_stop_id = self.stop_ids[: self.num_stop_columns, rows, None] == tokens.reshape(num_rows, num_each)
        if np.count_nonzero(is_stop_id):
            return False
        pieces = self.pieces(num_each)
        pieces[rows * self.tokens.shape[1] + at] = tokens.view(pieces.dtype)
        return True

    def _put_kept(
        self, rows: RowArray, tokens: IntArray, counts: IntArray, kept: IntArray, stopped: BoolArray
    ) -> IntArray:
        """Write and return those tokens that are kept: of each row so many, or fewer if a stop id is among
        them, which `kept` and `stopped` are told.
        """
        at = self.num_tokens[rows]
        row_of, nth_of_all = np.arange(len(rows)).repeat(counts), np.arange(len(tokens))
        first = np.add.accumulate(counts, dtype=np.int32) - counts
        places = nth_of_all + (rows * self.tokens.shape[1] + at - first)[row_of]
        is_stop_id = self.stop_ids[: self.num_stop_columns, rows].take(row_of, axis=1) == tokens
        if np.count_nonzero(is_stop_id):
            nth = nth_of_all - first[row_of]
            is_stop = is_stop_id.any(axis=0) & (nth + at[row_of] >= self.min_len[rows[row_of]])
            is_stop &= nth < kept[row_of]
            stops = np.flatnonzero(is_stop)
            stopping, first_of = np.unique(row_of[stops], return_index=True)
            kept[stopping] = nth[stops[first_of]] + 1
            stopped[stopping] = True
        if not all_of(kept == counts):
            is_kept = nth_of_all < (first + kept)[row_of]
            places, tokens = places[is_kept], tokens[is_kept]
        self.tokens.reshape(-1)[places] = tokens
        return tokens
