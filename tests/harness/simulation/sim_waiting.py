"""Rules of waiting, measured by a clock other than the scheduler's: requests that starve, their order, rows
that are kept, and requests that are given up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from runtime.wire.messages import Closed
from scheduler_proc.core.request import Request, Status
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.waiting_room import Patience

EPSILON_S = 1e-6


class WaitingWatch:
    """Told before and after every turn; looks in whenever admission asks for an order, or preemption acts."""

    def __init__(self, scheduler: Scheduler, patience: Patience) -> None:
        self._scheduler = scheduler
        self._patience = patience
        self._waited_s: defaultdict[int, float] = defaultdict(float)
        """Seconds in the queue, by request."""
        self._not_begun_s: defaultdict[int, float] = defaultdict(float)
        """Seconds until the first row, by request."""
        self._by_handle: dict[bytes, Request] = {}
        self._begun: set[int] = set()
        self._turn = self._next_turn = -1
        """The highest start tag that had got a row before this turn of the loop, and after it."""
        self.num_starved = 0
        admission, preemption = scheduler.builder.admission, scheduler.builder._preemption
        self._order = admission.order
        admission.order = self._checked_order  # type: ignore[method-assign]
        if preemption is not None:
            self._preempt = preemption.preempt
            preemption.preempt = self._checked_preempt  # type: ignore[method-assign]

    def time_passes(self, seconds: float) -> None:
        """Between two turns."""
        if self._scheduler.controls.is_paused:
            return
        for req in self._scheduler.lifecycle.requests.values():
            if req.status is Status.WAITING:
                self._waited_s[req.seq] += 0.0 if req.is_held else seconds
                self._not_begun_s[req.seq] += seconds

    def _must_starve(self, req: Request) -> bool:
        limit = self._patience.max_starvation_s
        is_its_turn = req.start_tag <= self._turn or not self._scheduler.lifecycle.accounts.has_several()
        return bool(limit) and is_its_turn and self._waited_s[req.seq] >= limit + EPSILON_S

    def _checked_order(self) -> Iterable[Any]:
        """Assert that those who starve come first, the longest waiting before the others."""
        order = list(self._order())
        queue = list(self._scheduler.lifecycle.waiting)
        starved = [req for req in queue if req.is_starved]
        first = [queue[position] for position in order[: len(starved)]]
        assert set(first) == set(starved), "somebody goes before those that starve"
        waited = [self._waited_s[req.seq] for req in first]
        assert all(a >= b - EPSILON_S for a, b in pairwise(waited)), "not by waiting"
        return order

    def _checked_preempt(self) -> None:
        # Who starves only since it is back in the queue, for what it waited before, may lose its row.
        starved = [req for req in self._scheduler.rows.running_requests() if req.is_starved]
        self._preempt()
        assert not any(req.row < 0 for req in starved), "took a row from one that starved"

    def check(self) -> None:
        """After a turn of the loop."""
        for req in self._scheduler.lifecycle.requests.values():
            self._by_handle.setdefault(req.handle, req)
            if req.status is not Status.WAITING or req.num_retractions:
                self._begun.add(req.seq)
                self._next_turn = max(self._next_turn, req.start_tag)
            else:
                limit = self._patience.queue_timeout_s
                assert not limit or self._not_begun_s[req.seq] < limit + EPSILON_S, "waits after its timeout"
            if req.status is Status.WAITING and not req.is_held:
                assert req.is_starved or not self._must_starve(req), "starves and goes before nobody"
            self.num_starved += req.is_starved
            if req.is_starved:
                waited_s = self._waited_s[req.seq]
                assert waited_s >= self._patience.max_starvation_s - EPSILON_S, "starves too early"
        self._turn = self._next_turn

    def judge(self, closed: Iterable[Closed]) -> None:
        """At the end."""
        for each in closed:
            if each.error is None or each.error.code != "queue_timeout":
                continue
            req = self._by_handle[each.handle]
            assert (each.error.status, each.error.retry_after_s > 0.0) == (503, True)
            assert req.seq not in self._begun, "given up after it had begun"
            waited_s = self._not_begun_s[req.seq]
            assert waited_s >= self._patience.queue_timeout_s - EPSILON_S, "given up too early"
