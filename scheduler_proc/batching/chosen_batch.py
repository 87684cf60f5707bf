"""ChosenBatch: adapter for a scheduler of the user's own (RequestScheduler). It calls the scheduler, checks
the answer, and translates it for the BatchBuilder.

If a call fails, or its answer cannot be carried out, the requests of that call end with the reason. The next
call is unaffected.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.messages import ErrorInfo
from scheduler_proc.batching.admission import Admission
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray
from scheduler_proc.llm_request import LlmRequest, LlmRequestState
from scheduler_proc.request_scheduler import (
    InvalidSchedule,
    RequestScheduler,
    SchedulerOutput,
    checked_lists,
)

logger = logging.getLogger(__name__)


class Chosen(NamedTuple):
    rows: RowArray
    """Rows that continue, a subset of those that are ready."""
    newcomers: list[Request]
    """Requests that may be admitted, in this order."""


class ChosenBatch:
    """Runs a scheduler of the user's own. Call `choose` once a step."""

    def __init__(
        self, lifecycle: Lifecycle, admission: Admission, scheduler: RequestScheduler, max_requests: int
    ) -> None:
        self._lifecycle = lifecycle
        self._rows = lifecycle.kv.rows
        self._admission = admission
        self._scheduler = scheduler
        self._max_requests = max_requests

    def choose(self, ready: RowArray) -> Chosen:
        """Ask the user's scheduler for the next step. Retracts the rows that it pauses. If the call fails,
        ends all requests that were shown to it.
        """
        waiting = self._lifecycle.waiting
        running = self._rows.running_requests()
        active = {LlmRequest(req): req for req in running}
        if len(waiting):
            active |= {LlmRequest(req): req for req in (waiting[at] for at in self._admission.order())}
        if not active:
            return Chosen(ready, [])
        ready_rows = set(ready.tolist())
        in_flight = {req.seq for req in running if ready_rows.isdisjoint(req.held_rows)}
        try:
            output = self._checked(
                self._scheduler.schedule_request(list(active), in_flight), active, in_flight
            )
        except Exception as error:
            # A user's own scheduler may raise any exception; the engine goes on with other requests.
            reason = str(error) if isinstance(error, InvalidSchedule) else f"{type(error).__name__}: {error}"
            logger.exception("the scheduler failed: the %d requests of this call end", len(active))
            self._fail(list(active.values()), reason)
            return Chosen(ready[:0], [])
        return self._applied(output, active, ready)

    def _checked(
        self, answer: object, active: dict[LlmRequest, Request], in_flight: set[int]
    ) -> SchedulerOutput:
        """Return the scheduler's answer if it can be carried out. Raises InvalidSchedule otherwise."""
        names = ("context", "generation", "paused")
        output = SchedulerOutput(*checked_lists("scheduler", answer, list(active), names))
        context, generation, paused = output
        chosen = context + generation
        if len(chosen) > self._max_requests:
            raise InvalidSchedule(f"{len(chosen)} requests in a step of {self._max_requests} at most")
        for request in chosen:
            if request.request_id in in_flight:
                raise InvalidSchedule(f"{request!r} is in flight: its result must come first")
        for request in context:
            if request.state is not LlmRequestState.CONTEXT_INIT:
                raise InvalidSchedule(f"{request!r} is no context request")
        for request in generation:
            if request.state is LlmRequestState.CONTEXT_INIT:
                raise InvalidSchedule(f"{request!r} is no generation request")
        for request in paused:
            if not request.has_row:
                raise InvalidSchedule(f"{request!r} cannot be paused: it does not run")
        return output

    def _applied(self, output: SchedulerOutput, active: dict[LlmRequest, Request], ready: RowArray) -> Chosen:
        for request in output.paused_requests:
            self._lifecycle.retract(active[request])
        chosen = [active[request] for request in output.context_requests + output.generation_requests]
        rows = np.array([row for req in chosen if req.row >= 0 for row in req.held_rows], np.intp)
        return Chosen(ready[np.isin(ready, rows)], [req for req in chosen if req.row < 0])

    def _fail(self, requests: list[Request], reason: str) -> None:
        error = ErrorInfo(f"the scheduler failed: {reason}"[:MAX_SHORT_CHARS], "scheduler_failed", None, 500)
        for req in requests:
            self._lifecycle.finish(req, "error", error=error)
