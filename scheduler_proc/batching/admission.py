"""Admission: gives rows to waiting requests, in the order of the schedule policy, until one does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from runtime.wire.messages import ErrorInfo
from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.cache.kv_cache_manager import Prefix
from scheduler_proc.cache.tenants import tenant_of
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import RequestFeature, combined_cost
from scheduler_proc.policy.base import InvalidOrder, SchedulePolicy, WaitingView, checked_order

logger = logging.getLogger(__name__)

MAX_PASSED_OVER = 128
"""Maximum number of waiting requests per step that are examined but not admitted. An arbitrary bound on the
time of a step.
"""
MAX_SKIPPED = 1024
"""Maximum number of waiting requests per step that are skipped cheaply, at 0.1 us each: those of a tenant
that is held back in this step, and those that are not ready (their guide or adapter is still being loaded).
"""


class Admission:
    """Gives rows to waiting requests.

    closes_batches: as in CapacityPolicy. If it is true, a request never waits for a page that another row is
    computing, because it would miss its batch. is_ready: as in Port.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        policy: SchedulePolicy,
        closes_batches: bool,
        is_ready: Callable[[RequestFeature], bool],
    ) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._closes_batches = closes_batches
        self._is_ready = is_ready
        self.policy = policy

    def admit(self, adder: PrefillAdder, newcomers: Sequence[Request] | None = None) -> None:
        """Give rows to waiting requests until one does not fit.

        Requests that are not ready yet are skipped. When a request does not fit because of other tenants'
        shares, or waits for rows of its own tenant, all requests of its tenant are skipped. newcomers: the
        only requests to consider, all of them waiting; None: all waiting requests in the policy's order. If
        beam widths are drained, nothing is skipped and requests start in the order of arrival.
        """
        waiting = self._lifecycle.waiting
        admitted: list[int] = []
        failed: list[tuple[Request, ErrorInfo]] = []
        num_passed_over = num_skipped = 0
        held_back: set[bytes] = set()
        positions, gate = self._positions(newcomers), self._lifecycle.room.width_gate
        if gate is not None:
            positions = gate.in_order(positions, waiting)
        for position in positions:
            if num_passed_over >= MAX_PASSED_OVER or num_skipped >= MAX_SKIPPED:
                break
            req = waiting.requests[position]
            if gate is not None and not gate.may_start(req, self._kv.rows.num_running):
                break
            if held_back and tenant_of(req.namespace) in held_back:
                num_skipped += 1
                continue
            try:
                if not self.is_prepared(req):
                    if gate is not None:
                        break
                    num_skipped += 1
                    continue
                prefix = self.prefix_if_it_may_start(req)
            except RequestError as error:
                failed.append((req, error_info(error)))  # the error itself would hold this frame in a cycle
                continue
            if prefix is None and gate is None:
                num_passed_over += 1
            elif prefix is not None and adder.try_admit(req, prefix):
                admitted.append(position)
                if gate is not None:
                    gate.note_started(req)
            elif gate is None and adder.was_withheld:
                held_back.add(tenant_of(req.namespace))
                num_passed_over += 1
            else:
                break
        if admitted:
            self._lifecycle.note_admitted(admitted)
        self._lifecycle.room.is_backed_up = len(waiting) > 0
        for req, info in failed:
            self._lifecycle.finish(req, "error", error=info)

    def _positions(self, newcomers: Sequence[Request] | None) -> Iterable[int]:
        """Return the current queue positions of the requests to consider. They are looked up anew because a
        retraction in this step can shift the queue. While requests must run alone, only the next of those is
        considered, and then for a while only those under which the engine has died before.
        """
        lifecycle = self._lifecycle
        if lifecycle.solitary:
            chosen = lifecycle.solitary.next_to_start(self._kv.rows.num_running)
            newcomers = [] if chosen is None else [chosen]
            if chosen is not None:
                lifecycle.room.enqueue_now(chosen)
        elif (first := lifecycle.suspicions.going_first()) is not None:
            newcomers = first if newcomers is None else [req for req in newcomers if req in first]
        if newcomers is None:
            return self.order()
        if not newcomers:
            return ()
        positions = {req.seq: at for at, req in enumerate(lifecycle.waiting)}
        # A retracted request may have moved one of them behind another request of its tenant.
        return [positions[req.seq] for req in newcomers if req.seq in positions]

    def prefix_if_it_may_start(self, req: Request) -> Prefix | None:
        """Return the cached prefix of a request that is prepared, or None if it should wait for a page that
        another row is computing.
        """
        if req.awaits is not None and self._kv.still_awaits(req):
            return None
        prefix = self._kv.match(req)
        return None if not self._closes_batches and self._kv.must_await(req, prefix) else prefix

    def is_prepared(self, req: Request) -> bool:
        """Return True if everything that the request needs before its start is there: its features are ready,
        and its adapter is in a device slot. Starts to load an adapter that is not. Raises RequestError.
        """
        if not req.features:
            if req.adapter is None and req.prompt_table is None:  # nearly always
                return True
        elif not all(map(self._is_ready, req.features)):
            return False
        slots = combined_cost(req.features, req.contents).slots
        return not slots or self._lifecycle.slots.prepare(slots, req.seq)

    def has_prepared(self) -> bool:
        """Return True if a waiting request, of the first MAX_SKIPPED, lacks nothing but a row and pages."""
        lifecycle = self._lifecycle
        if lifecycle.only_suspects_may_start:
            return len(lifecycle.waiting) > 0
        return any(map(self._seems_prepared, islice(lifecycle.waiting, MAX_SKIPPED)))

    def _seems_prepared(self, req: Request) -> bool:
        try:
            return self.is_prepared(req)
        except RequestError:
            return False  # the error is raised again when it is admitted

    def order(self) -> Iterable[int]:
        """Yield positions of the waiting queue in the order in which they are considered: first starving
        requests, then the others as the schedule policy orders them. The policy only sees the others.
        """
        num_starved = self._lifecycle.waiting.num_starved
        return self._policy_order(0) if not num_starved else self._starved_first(num_starved)

    def _starved_first(self, num_starved: int) -> Iterator[int]:
        yield from range(num_starved)
        for position in self._policy_order(num_starved):
            yield num_starved + position

    def _policy_order(self, num_starved: int) -> Sequence[int]:
        """Return the policy's order of the requests behind the first num_starved, or first come, first served
        if the policy fails.
        """
        view = WaitingView(self._lifecycle.waiting, self._kv, num_starved)
        try:
            return checked_order(self.policy.order(view), len(view))
        except InvalidOrder as error:
            logger.error("schedule policy: its answer is not an order: %s; first come, first served", error)
        except Exception:
            # A user's own policy may raise any exception; requests must not suffer for it.
            logger.exception("schedule policy raised; first come, first served")
        return range(len(view))
