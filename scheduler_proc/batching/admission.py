"""Admission: gives rows to waiting requests, in the order of the schedule policy, until one does not fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from runtime.wire.messages import ErrorInfo
from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.cache.kv_cache_manager import Prefix
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import combined_cost
from scheduler_proc.policy.base import InvalidOrder, SchedulePolicy, WaitingView, checked_order

logger = logging.getLogger(__name__)

MAX_PASSED_OVER = 128
"""Waiting requests that are looked at and passed over in one step; arbitrary, bounds the time of a step."""


class Admission:
    """`closes_batches`: as CapacityPolicy's. Who would wait for a page that another row computes is not made
    to: it would miss the batch.
    """

    def __init__(self, lifecycle: Lifecycle, policy: SchedulePolicy, closes_batches: bool) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._closes_batches = closes_batches
        self.policy = policy

    def admit(self, adder: PrefillAdder, newcomers: Sequence[Request] | None = None) -> None:
        """Until one does not fit; those that are not ready yet are passed over. newcomers: who is considered,
        all of them waiting; None: everybody, as the policy orders them.
        """
        waiting = self._lifecycle.waiting
        admitted: list[int] = []
        failed: list[tuple[Request, ErrorInfo]] = []
        num_passed_over = 0
        for position in self._positions(newcomers):
            if num_passed_over >= MAX_PASSED_OVER:
                break
            req = waiting[position]
            try:
                prefix = self.prefix_if_it_may_start(req)
            except RequestError as error:
                failed.append((req, error_info(error)))  # the error itself would hold this frame in a cycle
                continue
            if prefix is None:
                num_passed_over += 1
            elif adder.try_admit(req, prefix):
                admitted.append(position)
            else:
                break
        if admitted:
            self._lifecycle.note_admitted(admitted)
        for req, info in failed:
            self._lifecycle.finish(req, "error", error=info)

    def _positions(self, newcomers: Sequence[Request] | None) -> Sequence[int]:
        """Where they wait now: a row that was taken back in this step has moved those behind its request.
        While somebody has to run alone, only the one whose turn it is.
        """
        lifecycle = self._lifecycle
        if lifecycle.solitary:
            chosen = lifecycle.solitary.next_to_start(self._kv.rows.num_running)
            newcomers = [] if chosen is None else [chosen]
        if newcomers is None:
            return self.order()
        if not newcomers:
            return ()
        positions = {req.seq: at for at, req in enumerate(lifecycle.waiting)}
        return [positions[req.seq] for req in newcomers]

    def prefix_if_it_may_start(self, req: Request) -> Prefix | None:
        """Its cached prefix; None while something other than space keeps it waiting. Raises RequestError."""
        if self._kv.still_awaits(req):
            return None
        if req.features:
            ready = all(feature.ready() for feature in req.features)
            if not ready or not self._lifecycle.slots.can_hold(combined_cost(req.features).slot):
                return None
        prefix = self._kv.match(req)
        return None if not self._closes_batches and self._kv.must_await(req, prefix) else prefix

    def order(self) -> Sequence[int]:
        """Positions in the waiting queue, as the policy wants them considered."""
        view = WaitingView(self._lifecycle.waiting, self._kv)
        try:
            return checked_order(self.policy.order(view), len(view))
        except InvalidOrder as error:
            logger.error("schedule policy: its answer is not an order: %s; first come, first served", error)
        except Exception:
            # A user's own policy may raise anything; requests must not suffer for it.
            logger.exception("schedule policy raised; first come, first served")
        return range(len(view))
