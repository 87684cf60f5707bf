"""Rows: the row columns together with the request that holds each row."""

from __future__ import annotations

from runtime.ring.suspects.roster import RowViews
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.handle import HANDLE_BYTES
from runtime.wire.plan import RowSetup
from scheduler_proc.core.guesses import RowGuesser
from scheduler_proc.core.request import FINISHED, Request, StopIds
from scheduler_proc.core.row_columns import RowColumns


class Rows(RowColumns):
    """Columns of all rows, and the request that holds each row."""

    __slots__ = ("_num_further", "_num_stays", "_setups", "_stops", "free", "guesser", "holder")

    def __init__(self, max_rows: int, max_len: int) -> None:
        """Make the columns of max_rows rows. max_len: most tokens of one request, prompt and
        output together.
        """
        super().__init__(max_rows, max_len)
        self.holder: list[Request | None] = [None] * max_rows
        self.free = list(range(max_rows))[::-1]  # the last one is taken first
        self._num_stays = 0
        self._num_further = 0  # rows of groups, beyond the first of each
        self._stops: list[StopIds | None] = [None] * max_rows  # whose ids are in `stop_ids`
        self._setups: dict[int, RowSetup] = {}
        self.guesser: RowGuesser | None = None
        """Makes guesses for many rows at once; None if no request uses speculation."""

    def views(self) -> RowViews:
        """Return the memory of the columns that the roster repeats."""
        reached, stays = memoryview(self.kv_len_of).cast("B"), memoryview(self.stay_of).cast("B")
        return RowViews(memoryview(self._handles), reached, stays)

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_running(self) -> int:
        """Number of requests that hold a row or a group of rows."""
        return self.max_rows - len(self.free) - self._num_further

    def holders(self) -> list[Request]:
        """Return the holder of each held row, in the order of admission: requests, and the other members of
        their groups.
        """
        return [req for row in self.running.tolist() if (req := self.holder[row]) is not None]

    def running_requests(self) -> list[Request]:
        """Return the requests that hold a row, in the order of admission."""
        holders = self.holders()
        return [req for req in holders if req.head is req] if self._num_further else holders

    def acquire(self, req: Request, kv_len: int) -> None:
        """Give req a free row and move its facts into the columns. The next plan tells the device. kv_len:
        number of tokens whose KV is there already.
        """
        row = self.free.pop()
        num_bytes, at = len(req.parked), row * self._row_bytes
        self._token_bytes[at : at + num_bytes] = req.parked
        num_tokens = num_bytes // TOKEN_BYTES
        self.num_tokens_of[row] = num_tokens
        self.num_given_of[row] = num_tokens
        self.max_len_of[row] = req.max_len
        self.min_len_of[row] = req.min_len
        self.kv_len_of[row] = kv_len
        self.in_flight_of[row] = 0
        if self._stops[row] is not req.stops:  # nearly all requests have the model's
            self._stops[row] = req.stops
            self.stop_ids[:, row] = req.stops.column
            self.num_stop_columns = max(self.num_stop_columns, req.stops.num_columns)
        is_plain = not req.features and req.group is None and req.stops.fit_the_column
        self.needs_python_of[row] = not is_plain
        if not is_plain:  # for plain rows these have no meaning
            self.token_step[row] = 0
            self.only_guesses[row] = False
        if req.group is not None:
            self._num_further += req.head is not req
        self.urgency_of[row] = req.urgency if req.is_starved else req.priority
        self._handles[row * HANDLE_BYTES : (row + 1) * HANDLE_BYTES] = req.handle
        self._num_stays += 1
        self.stay_of[row] = self._num_stays
        self.holder[row] = req
        self._running = None
        self._setups[row] = req.row_setup(row)
        req.row = row
        req.num_given = num_tokens
        req.parked = b""

    def undo(self, req: Request, start: int) -> None:
        """Take the row back to before its last step, which began at position `start` and is the only one that
        it is in. The next plan tells the device, which has sampled a token meanwhile.
        """
        row = req.row
        self.kv_len_of[row] = start
        self.in_flight_of[row] = 0
        req.parked = self.packed(row, 0, self.num_tokens_of[row]).tobytes()
        self._setups[row] = req.row_setup(row)
        req.parked = b""

    def settle(self, req: Request) -> None:
        """Make the row a plain decode from now on, if the request's features agree. Called when the first
        token of a stay is there.
        """
        row = req.row
        if req.group is not None or not req.stops.fit_the_column:
            return  # never decoded plainly
        if not req.features or all(feature.is_settled for feature in req.features):
            self.needs_python_of[row] = False
            self.timed.add(row)

    def release(self, req: Request) -> None:
        """Release the row. Tokens in flight for it are dropped; see `still_held`."""
        row = req.row
        if req.status is not FINISHED:
            req.parked = self.packed(row, 0, self.num_tokens_of[row]).tobytes()
        self.stay_of[row] = 0
        self.join_again(row)
        self.holder[row] = None
        self.free.append(row)
        self._running = None
        self._setups.pop(row, None)
        self.timed.discard(row)
        if req.group is not None:
            self._num_further -= req.head is not req
        if num_accepted := self.num_accepted_of[row]:
            req.num_accepted_before += num_accepted
            self.num_accepted_of[row] = 0
        if self._has_marked_many:
            self._guesses_when_committed[row] = False
        if self._planned_when_committed:
            self._planned_when_committed = {mark for mark in self._planned_when_committed if mark[0] != row}
        req.row = -1

    def take_setups(self) -> tuple[RowSetup, ...]:
        """Return and clear the setups of rows that the device does not know yet, at most one for each row."""
        setups = tuple(self._setups.values())
        self._setups.clear()
        return setups
