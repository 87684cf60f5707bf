"""Lifecycle: every live sequence, and the only code that moves one from one state to the next.

    add ──► WAITING ──admit──► RUNNING ──finish──► FINISHED     (one Closed each)
               ▲                  │
               └─────retract──────┘        replaced: FINISHED without a Closed, a higher attempt goes on

accepted = terminated + replaced + live, always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Raw

from runtime.ring.suspects.roster import Roster
from runtime.wire.handle import next_sibling
from runtime.wire.messages import Closed, CloseReason, ErrorInfo
from scheduler_proc.cache.group_pages import release_others
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.output import Output
from scheduler_proc.core.request import FINISHED, RUNNING, WAITING, Request
from scheduler_proc.core.solitary import SolitaryRuns, Suspicions
from scheduler_proc.observe.queue_times import QueueTimes
from scheduler_proc.waiting.deadlines import Deadlines
from scheduler_proc.waiting.serving_time import ServingTime
from scheduler_proc.waiting.tenant_accounts import Accounts
from scheduler_proc.waiting.waiting_queue import SortKey, in_turn
from scheduler_proc.waiting.waiting_room import FOR_EVER, Patience, WaitingRoom

NEVER = math.inf
CAME_TO_AN_END = frozenset({"stop", "length", "stop_string"})
"""Reasons for the end of a sequence that has computed everything that it was to."""


class Lifecycle:
    """Owner of the table of live sequences and of the waiting queue."""

    def __init__(
        self,
        kv: KVCacheManager,
        slots: SlotPool,
        output: Output,
        clock: Callable[[], float],
        *,
        sort_key: SortKey = in_turn,
        roster: Roster | None = None,
        patience: Patience = FOR_EVER,
        weight_version: str = "",
    ) -> None:
        """sort_key, patience: as in WaitingRoom. roster: file that tells the launcher which sequences are
        live; None: none is kept. weight_version: of the worker's weights, for the ends of sequences.
        """
        self.kv = kv
        self.slots = slots
        self.output = output
        self.requests: dict[bytes, Request] = {}
        """Live sequences by sequence key. At most one attempt of a sequence is live."""
        self.accounts = Accounts(kv.rows, clock)
        self.serving = ServingTime(clock)
        self.room = WaitingRoom(self.requests, self.accounts, self.serving, sort_key, patience)
        self.waiting = self.room.queue
        self.deadlines = Deadlines(self.requests)
        self.solitary = SolitaryRuns()
        self.suspicions = Suspicions(clock)
        self.queue_times = QueueTimes()
        self.roster = roster or Roster(bytearray())
        self.roster.watch(kv.rows.views())
        self._clock = clock
        self._patience = patience
        self._weight_version = weight_version
        self.num_accepted = 0
        self.num_terminated = 0
        self.num_replaced = 0
        self.num_retracted = 0
        self.num_paused = 0
        """Number of waiting sequences that were retracted."""
        self.on_finish: Callable[[Request], object] | None = None
        """Called with every accepted sequence that ends, before it gives back its row and pages."""

    def add(self, req: Request, stream_open: Raw, more: Sequence[Raw] = ()) -> None:
        """Accept a new sequence, which waits for its row. more: StreamOpens of the other sequences of a beam
        search.
        """
        self.num_accepted += 1
        self.output.open(req.handle, stream_open)
        for each in more:
            self.output.open(req.handle, each)
        self.requests[req.key] = req
        self.roster.add(req.suspect, req.tenant)
        self.accounts.add(req)
        if self.accounts.has_several():
            self.room.weigh_prompt(req, self.kv.match_len)
        self.room.enter(req)
        if req.deadline_s:
            self.deadlines.add(req)

    def refuse(
        self,
        handle: bytes,
        stream_open: Raw,
        reason: CloseReason,
        error: ErrorInfo | None,
        more: Sequence[Raw] = (),
    ) -> None:
        """Open and close a sequence that is refused on arrival. more: as in `add`."""
        self.num_accepted += 1
        self.output.open(handle, stream_open)
        self.num_terminated += 1
        self.output.close(Closed(handle, reason, error=error))
        for number, each in enumerate(more, 1):
            self.output.open(handle, each)
            self.output.close(Closed(next_sibling(handle, number), reason, error=error))

    def note_admitted(self, positions: list[int]) -> None:
        """Record that the requests at these positions of the waiting queue got a row."""
        now = self._clock()
        for req in self.room.take_admitted(positions):
            req.status = RUNNING
            if not req.num_retractions:
                self.queue_times.add(now - req.arrived_s)
            else:
                self.num_paused -= 1

    def finish(
        self, req: Request, reason: CloseReason, *, stop_token: int = -1, error: ErrorInfo | None = None
    ) -> None:
        """End a sequence: release everything it holds, and close its stream."""
        if self.on_finish is not None:
            self.on_finish(req)
        if self.suspicions.reached and reason in CAME_TO_AN_END and self.suspicions.discard(req):
            self.roster.note_past(req.suspect)
        cached_tokens = req.cached_tokens if req.cached_tokens > 0 else 0
        if cached_tokens and req.prompt_table is not None:
            cached_tokens -= req.num_virtual_of(cached_tokens)
        version = self._weight_version
        closed = Closed(req.handle, reason, stop_token, cached_tokens, error, weight_version=version)
        for feature in req.features:
            closed = feature.closing(closed)
        if req.row >= 0 and reason in CAME_TO_AN_END:
            self.roster.note_served()
        self._remove(req, is_early=reason not in CAME_TO_AN_END)
        self.num_terminated += 1
        self.output.close(closed)

    def tick(self) -> None:
        """End every sequence that has reached its deadline; its output so far is kept. Refuse sequences that
        have waited too long to start, and move those forward that others have passed for too long. Clear
        sequences of the suspicion that the engine dies of them.
        """
        if self.suspicions.reached or self.solitary.requests:
            self._clear_suspects()
        if len(self.deadlines):
            for req in self.deadlines.take_passed(self._clock()):
                self.finish(req, "timeout")
        tick_at = self.room.tick_at
        if tick_at != NEVER and tick_at <= self.serving.now():
            for req in self.room.tick():
                self.finish(req, "error", error=self._patience.error())

    @property
    def only_suspects_may_start(self) -> bool:
        """True while sequences under which the engine has died before go first, or run alone."""
        return bool(self.solitary) or self.suspicions.going_first() is not None

    def _clear_suspects(self) -> None:
        for req in self.suspicions.past():
            self.suspicions.discard(req)
            self.roster.note_past(req.suspect)
        cleared = self.solitary.cleared()
        if cleared is not None:
            self.solitary.discard(cleared)
            if self.solitary:  # it goes on beside the others, once the rest of these has run alone
                self.retract(cleared)

    def replace(self, req: Request) -> None:
        """End a sequence that a higher attempt replaces. Its pages stay in the cache, and no Closed
        is sent.
        """
        self._remove(req)
        self.num_replaced += 1

    def retract(self, req: Request) -> None:
        """Release a request's row; it starts again later.

        Committed tokens are kept. Tokens in flight are dropped and computed again, with the same values.
        """
        req.computed_len = max(req.computed_len, req.kv_len)
        self._give_back_row(req)
        req.account.num_running -= 1
        req.account.num_rows -= req.width
        req.num_retractions += 1
        self.num_paused += 1
        req.status = WAITING
        self.num_retracted += 1
        self.room.enter(req)

    def _remove(self, req: Request, *, is_early: bool = False) -> None:
        if req.status is WAITING:
            self.room.leave(req)
            if req.num_retractions:
                self.num_paused -= 1
        account, row = req.account, req.row
        num_tokens = req.num_tokens if row < 0 else self.kv.rows.num_tokens_of[row]
        if req.group is not None:
            num_tokens += req.group.has_ended  # the token that it chose last is in none of its rows
        self.accounts.discard(req, num_tokens)
        req.status = FINISHED
        if row >= 0 or req.num_retractions:
            self.room.fair.note_end(req, num_tokens)
        if row >= 0:
            self._give_back_row(req)
            account.num_running -= 1
            account.num_rows -= req.width
            if account.queued is not None:
                self.room.note_row_free(account)
        del self.requests[req.key]
        if is_early and row >= 0:
            self.roster.leave(req.suspect)
        else:
            self.roster.discard(req.suspect)
        if self.solitary.requests:
            self.solitary.discard(req)
        if self.suspicions.reached:
            self.suspicions.discard(req)
        if req.features:
            for feature in req.features:
                feature.release()
            req.features = ()  # they may point back at the request: leave no cycle for the collector

    def _give_back_row(self, req: Request) -> None:
        if req.group is not None:
            release_others(self.kv, req.group)
        self.kv.release(req)
        if req.group is not None:  # a search starts again, and comes to the same result
            req.forget_output()
        if req.slots:
            self.slots.give_back(req.slots)
            req.forget_slots()
        if req.features:
            for feature in req.features:
                feature.row_lost()

    def check(self) -> None:
        """Assert that every accepted sequence is counted exactly once."""
        assert self.num_accepted == self.num_terminated + self.num_replaced + len(self.requests)
        assert len(self.requests) == len(self.room) + self.kv.rows.num_running
        self.slots.check()
        self.accounts.check(self.requests.values())
        self.room.check()
