"""RowColumns: frequently used state of all running requests, one numpy column per fact, indexed by row.

A fact is in a column while its request holds a row, and on the request otherwise. Methods that take an array
of rows are the decode path: their cost depends neither on sequence length nor on the number of unused rows.
It knows neither pages nor requests; `Rows` says which request holds which row.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.wire.format import TOKEN_BYTES, BoolArray, IntArray
from runtime.wire.handle import HANDLE_BYTES

MAX_STOP_IDS = 4
"""Maximum number of stop ids that fit into the columns. The tokens of a request with more are checked one at
a time.
"""

RowArray: TypeAlias = npt.NDArray[np.intp]
StayArray: TypeAlias = npt.NDArray[np.int64]


def int_column(length: int, value: int = 0) -> tuple[IntArray, array[int]]:
    """Return a column of int32 as a NumPy array, and its memory as an array of Python, where access to one
    item takes a third of the time.
    """
    items = array("i", [value]) * length
    return np.frombuffer(items, np.int32), items


def all_of(flags: BoolArray) -> bool:
    """Return True if all flags [n] are true. Searches the bytes, which takes a fifteenth of the time of
    `flags.all()` for the rows of a step.
    """
    return 0 not in flags.tobytes()


class RowColumns:
    """Columns of all rows. max_len: most tokens of one request, prompt and output together. Names with `_of`
    share memory with the column of that name, for access to one row: `num_tokens_of[row]`.
    """

    # In an instance dictionary, Python finds no more than 30 attributes fast.
    __slots__ = (
        "_guesses_when_committed", "_handles", "_has_marked_many", "_pieces", "_planned_when_committed",
        "_row_bytes", "_running", "_token_bytes", "handle", "in_flight", "in_flight_of", "kv_len",
        "kv_len_of", "max_len", "max_len_of", "max_rows", "min_len", "min_len_of", "needs_python",
        "needs_python_of", "num_accepted", "num_accepted_of", "num_given", "num_given_of", "num_sitting",
        "num_stop_columns", "num_tokens", "num_tokens_of", "only_guesses", "sits", "sits_of", "stay",
        "stay_of", "stop_ids", "timed", "token_s", "token_step", "tokens", "urgency", "urgency_of",
    )  # fmt: skip

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.max_rows = max_rows
        # Prompt and committed output of each row.
        self.tokens: IntArray = np.zeros((max_rows, max_len), np.int32)
        # The same memory as bytes, row after row: numpy takes three times as long to copy a request's tokens
        # in and out.
        self._token_bytes = memoryview(self.tokens.data).cast("B")
        self._row_bytes = max_len * TOKEN_BYTES
        self.num_tokens, self.num_tokens_of = int_column(max_rows)
        # Number of tokens with which the request came to its row: computing these is prefill.
        self.num_given, self.num_given_of = int_column(max_rows)
        # Value of num_tokens at which the request ends, and position below which no stop id ends it.
        self.max_len, self.max_len_of = int_column(max_rows)
        self.min_len, self.min_len_of = int_column(max_rows)
        # Number of tokens whose KV launched plans write, and of tokens that they sample and that are not yet
        # committed.
        self.kv_len, self.kv_len_of = int_column(max_rows)
        self.in_flight, self.in_flight_of = int_column(max_rows)
        self.stop_ids: IntArray = np.full((MAX_STOP_IDS, max_rows), -1, np.int32)
        # Number of leading columns of stop ids that were ever used. The others are not read.
        self.num_stop_columns = 1
        # True for a row with features, or with too many stop ids for the columns: it is never decoded
        # plainly.
        self.needs_python_of = bytearray(max_rows)
        self.needs_python: BoolArray = np.frombuffer(self.needs_python_of, np.bool_)
        # True if the row's only feature is guessing that is done for many rows at once (RowGuesser).
        self.only_guesses: BoolArray = np.zeros(max_rows, np.bool_)
        # Number of right guesses of this stay.
        self.num_accepted, self.num_accepted_of = int_column(max_rows)
        self.urgency, self.urgency_of = int_column(max_rows)
        self._handles = bytearray(max_rows * HANDLE_BYTES)
        self.handle: npt.NDArray[np.void] = np.frombuffer(self._handles, f"V{HANDLE_BYTES}")
        # Rows that are decoded plainly although their requests have features; and time and step of their last
        # token, if they have one.
        self.timed: set[int] = set()
        self.token_s: npt.NDArray[np.float64] = np.zeros(max_rows, np.float64)
        self.token_step: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # Number of this stay, never used twice; 0: the row is free.
        self.stay_of = array("q", [0]) * max_rows
        self.stay: StayArray = np.frombuffer(self.stay_of, np.int64)
        # True for a row that takes part in no step for now; and the number of such rows.
        self.sits_of = bytearray(max_rows)
        self.sits: BoolArray = np.frombuffer(self.sits_of, np.bool_)
        self.num_sitting = 0
        self._running: RowArray | None = None
        self._planned_when_committed: set[tuple[int, Hashable]] = set()
        # The same mark for rows whose guesses are made for many rows at once.
        self._guesses_when_committed: BoolArray = np.zeros(max_rows, np.bool_)
        self._has_marked_many = False
        self._pieces: dict[int, npt.NDArray[np.void]] = {}

    @property
    def running(self) -> RowArray:
        """Return the rows that are held, in the order of admission. Cached until a row is acquired or
        released.
        """
        if self._running is None:
            held = self.stay.nonzero()[0]
            self._running = held[self.stay[held].argsort()]
        return self._running

    def still_held(self, rows: RowArray, stays: StayArray) -> BoolArray:
        """Return a mask of the rows that still have the holder that they had when a step was planned."""
        held: BoolArray = self.stay[rows] == stays
        return held

    def plan_when_committed(self, row: int, wanted: bool, owner: Hashable) -> None:
        """Plan the row only when its tokens are committed, never with one in flight; or, with wanted False,
        withdraw this owner's wish, so that it overlaps again when no owner wants it. Holds until the row is
        released.
        """
        if wanted:
            self._planned_when_committed.add((row, owner))
        else:
            self._planned_when_committed.discard((row, owner))

    def plan_all_when_committed(self, rows: RowArray, wanted: BoolArray) -> None:
        """Do the same as plan_when_committed for several rows, on behalf of the RowGuesser."""
        self._guesses_when_committed[rows] = wanted
        self._has_marked_many = True

    def is_planned_when_committed(self, row: int) -> bool:
        """Return True if any owner wants the row to be planned only when its tokens are committed."""
        return self._guesses_when_committed.item(row) or any(
            row == wanted for wanted, _ in self._planned_when_committed
        )

    def sit_out(self, row: int) -> None:
        """Plan no step with the row until it joins again, or is released."""
        self.num_sitting += not self.sits_of[row]
        self.sits_of[row] = True

    def join_again(self, row: int) -> None:
        """Plan steps with the row again."""
        self.num_sitting -= self.sits_of[row]
        self.sits_of[row] = False

    @property
    def must_commit_first(self) -> bool:
        """Return True if a row that must be planned after its commit has a token in flight."""
        rows = self._planned_when_committed
        if rows and any(self.in_flight_of[row] for row, _ in rows):
            return True
        if not self._has_marked_many:
            return False
        marked = self._guesses_when_committed.nonzero()[0]
        self._has_marked_many = len(marked) > 0
        return bool(np.count_nonzero(self.in_flight[marked]))

    def packed(self, row: int, start: int, end: int) -> memoryview:
        """Return a view of the packed tokens start .. end - 1 of a row."""
        at = row * self._row_bytes
        return self._token_bytes[at + start * TOKEN_BYTES : at + end * TOKEN_BYTES]

    def append(self, row: int, tokens: list[int]) -> int:
        """Commit the sampled tokens of a single row. Returns its new number of tokens."""
        start, n = self.num_tokens_of[row], len(tokens)
        self.tokens[row, start : start + n] = tokens if n > 1 else tokens[0]
        self.num_tokens_of[row] = start + n
        self.in_flight_of[row] -= 1
        return start + n

    def last_time(self, row: int) -> tuple[float, int] | None:
        """Return the time of the last token of a row and the number of its step, also for a row that was just
        released. None if the token came to the row's features.
        """
        step = self.token_step.item(row)
        return (self.token_s.item(row), step) if step else None

    def pieces(self, num_tokens: int) -> npt.NDArray[np.void]:
        """Return a strided view of the tokens of all rows, one row after the other, as pieces of num_tokens
        tokens that start at every token. Reading or writing a piece takes an eighth of the time of its single
        tokens.
        """
        pieces = self._pieces.get(num_tokens)
        if pieces is None:
            num_pieces = self.tokens.size - num_tokens + 1
            pieces = np.ndarray((num_pieces,), f"V{4 * num_tokens}", self.tokens, strides=(4,))
            self._pieces[num_tokens] = pieces
        return pieces

    # -- the decode path ------------------------------------------------------------------------------------

    def ready(self, feeds_back: bool) -> RowArray:
        """Return the rows that may still produce tokens and whose next input id is known to the host or, if
        feeds_back, to the device.
        """
        rows = self.running
        in_flight = self.in_flight[rows]
        predicted = self.num_tokens[rows] + in_flight
        ready = (predicted > self.kv_len[rows]) & (predicted < self.max_len[rows])
        if not feeds_back:
            ready &= in_flight == 0
        if self.num_sitting:
            ready &= ~self.sits[rows]
        return rows if all_of(ready) else rows[ready]

    def plain_decodes(self, rows: RowArray) -> BoolArray:
        """Return a mask of the ready rows that are past their prefill and have nothing attached: each
        computes exactly one token.
        """
        plain: BoolArray = (self.kv_len[rows] >= self.num_given[rows]) & ~self.needs_python[rows]
        return plain

    def next_ids(self, rows: RowArray, unknown: int) -> IntArray:
        """Return the input id of each of these decodes, [n] int32; `unknown` where only the device has it."""
        known = self.tokens[rows, self.kv_len[rows]]
        known[self.in_flight[rows] != 0] = unknown
        return known

    def count_as_launched(
        self, rows: RowArray, lens: IntArray | int = 1, samples: IntArray | int = 1
    ) -> None:
        """Count a launched plan: it computes `lens` tokens of each row and samples `samples` (0 or
        1) tokens.
        """
        self.kv_len[rows] += lens
        self.in_flight[rows] += samples

    def note_time(self, rows: RowArray, now_s: float, step: int) -> None:
        """Record the time at which the rows' tokens of a step arrived. Called while there are
        `timed` rows.
        """
        self.token_s[rows] = now_s
        self.token_step[rows] = step

    def append_one(self, rows: RowArray, tokens: IntArray) -> tuple[RowArray, BoolArray]:
        """Commit one sampled token to each row. Returns the rows that end, and a mask of those that end by a
        stop id.
        """
        at = self.num_tokens[rows]
        self.tokens[rows, at] = tokens
        at += 1
        self.num_tokens[rows] = at
        self.in_flight[rows] -= 1
        ended = at >= self.max_len[rows]
        stopped: BoolArray = self.stop_ids[0][rows] == tokens
        for column in self.stop_ids[1 : self.num_stop_columns]:  # mostly none
            stopped |= column[rows] == tokens
        if np.count_nonzero(stopped):
            stopped &= at > self.min_len[rows]
            ended |= stopped
        places = ended.nonzero()[0]
        return rows[places], stopped[places]

    def append_several(
        self, rows: RowArray, tokens: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray, BoolArray, BoolArray]:
        """Commit several sampled tokens to each row. counts [n]: at least one each; tokens [sum(counts)] in
        the order of the rows.

        Tokens behind a stop id or the length limit are dropped. Returns the number of tokens kept of each
        row, the kept tokens, a mask of the rows that end, and a mask of those that end by a stop id.
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
        """Write the tokens of rows that all got the same number. Returns False, with nothing written, if the
        numbers differ or a stop id is among the tokens.
        """
        num_rows = len(rows)
        num_each, rest = divmod(len(tokens), num_rows)
        # No row keeps more tokens than it got, so if these sums agree, all kept what they got.
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
        """Write and return the tokens that are kept of each row. Updates `kept` and `stopped` for rows with a
        stop id among theirs.
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
