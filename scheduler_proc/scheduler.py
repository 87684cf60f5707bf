"""Scheduler: the step loop's sequence. Each part it calls owns its own state; no capability is named here.

drain inbox → build batch (continue running rows, then admit waiting ones) → launch
            → [sample, once masks are known] → commit the oldest step (while the newest runs)
            → flush one TokenBatch
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from runtime.errors import ExecutorError, RequestError
from runtime.messages import ErrorInfo, ToScheduler
from runtime.wire import IntArray, unpack_ids
from scheduler_proc.batch import LooseResults, RowLogprobs, ScheduleBatch, ScheduledRow
from scheduler_proc.cache.kv_cache_manager import KVCacheManager, Prefix
from scheduler_proc.capacity import CapacityScheduler
from scheduler_proc.executor import Executor, StepHandle
from scheduler_proc.features.base import Sampled, combined_cost
from scheduler_proc.intake import Intake
from scheduler_proc.lifecycle import Lifecycle, error_info
from scheduler_proc.policy.base import InvalidOrder, SchedulePolicy, WaitingView, checked_order
from scheduler_proc.prefill_adder import PrefillAdder
from scheduler_proc.request import Request
from scheduler_proc.rows import BoolArray, RowArray
from scheduler_proc.step_log import StepLog

logger = logging.getLogger(__name__)

MAX_PASSED_OVER = 128
"""Waiting requests that are looked at and passed over in one step; arbitrary, bounds the time of a step."""


class Scheduler:
    """Launch, then look back. `max_tokens_per_step`: new tokens of one forward, decodes included."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        intake: Intake,
        policy: SchedulePolicy,
        capacity: CapacityScheduler,
        executor: Executor,
        max_tokens_per_step: int,
        step_log: StepLog,
    ) -> None:
        self.lifecycle = lifecycle
        self.intake = intake
        self.policy = policy
        self.capacity = capacity
        self.executor = executor
        self.max_tokens_per_step = max_tokens_per_step
        self.step_log = step_log
        self.kv: KVCacheManager = lifecycle.kv
        self.rows = lifecycle.kv.rows
        self.output = lifecycle.output
        self.in_flight: deque[tuple[ScheduleBatch, StepHandle]] = deque()
        self.num_steps = 0

    @property
    def is_idle(self) -> bool:
        """Nothing lives, nothing is in flight and everything has been said."""
        return not self.lifecycle.requests and not self.in_flight and not self.output.is_blocked

    # -- one step -------------------------------------------------------------------------------------------

    def step(self, inbox: Iterable[ToScheduler]) -> bool:
        """One turn of the loop. Returns whether it launched or committed anything.

        While the other end refuses output nothing new is launched; the inbox is still applied, and what is in
        flight is committed, so memory stays bounded by what is alive. Raises ExecutorError after every
        request has failed.
        """
        for message in inbox:
            self.intake.receive(message)
        try:
            worked = self._launch_and_commit() if self.output.flush() else self._commit_down_to(0)
        except ExecutorError as error:
            self.fail_all(ErrorInfo(f"the model worker failed: {error}"[:4096], "worker_failed", None, 503))
            raise
        self.output.flush()
        return worked

    def _launch_and_commit(self) -> bool:
        batch = self._build_batch()
        if not len(batch):
            return self._commit_down_to(0)
        self._launch(batch)
        self._commit_down_to(self.executor.max_in_flight - 1)
        return True

    def _commit_down_to(self, num_in_flight: int) -> bool:
        worked = len(self.in_flight) > num_in_flight
        while len(self.in_flight) > num_in_flight:
            self._commit_oldest()
        return worked

    def _build_batch(self) -> ScheduleBatch:
        batch = ScheduleBatch(self.rows)
        adder = PrefillAdder(batch, self.kv, self.capacity, self.lifecycle.slots, self.max_tokens_per_step)
        ready = self.rows.ready(self.executor.feeds_back)
        plain = self.rows.plain_decodes(ready)
        if adder.try_continue_together(ready[plain]):
            ready = ready[~plain]
        if len(ready):
            self._continue_one_by_one(ready, batch, adder)
        if len(self.lifecycle.waiting) and adder.can_admit:
            self._admit(adder)
        self.step_log.note_batch(len(batch), adder.totals)
        return batch

    def _continue_one_by_one(self, ready: RowArray, batch: ScheduleBatch, adder: PrefillAdder) -> None:
        """Who ranks first gets pages first; when they are
        short, somebody not yet in the batch gives up its row.
        """
        tenants = [req for row in ready.tolist() if (req := self.rows.tenant[row]) is not None]
        for req in sorted(tenants, key=self.capacity.rank):
            while req.row >= 0 and not adder.try_continue(req):
                taken = batch.taken()
                candidates = [other for other in self.rows.running_requests() if other.row not in taken]
                self._give_way(self.capacity.victim(candidates))

    def _give_way(self, victim: Request) -> None:
        if self.rows.num_running == 1:
            # Nobody is left to wait for: it would be retracted and admitted for ever.
            error = ErrorInfo("the KV cache is too small for this request", "kv_cache_exhausted", None, 503)
            self.lifecycle.finish(victim, "error", error=error)
            return
        self.lifecycle.retract(victim)
        self.capacity.note_retraction()
        logger.info("KV cache is full: retracted a request, %d in all", self.lifecycle.num_retracted)

    # -- admission ------------------------------------------------------------------------------------------

    def _admit(self, adder: PrefillAdder) -> None:
        """Give rows to waiting requests until one does not fit; those not ready yet are passed over."""
        waiting = self.lifecycle.waiting
        admitted: list[int] = []
        failed: list[tuple[Request, ErrorInfo]] = []
        num_passed_over = 0
        for position in self._order():
            if num_passed_over >= MAX_PASSED_OVER:
                break
            req = waiting[position]
            try:
                prefix = self._prefix_if_it_may_start(req)
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
            self.lifecycle.note_admitted(admitted)
        for req, info in failed:
            self.lifecycle.finish(req, "error", error=info)

    def _prefix_if_it_may_start(self, req: Request) -> Prefix | None:
        """Its cached prefix; None while something other than space keeps it waiting. Raises RequestError."""
        if self.kv.still_awaits(req):
            return None
        if req.features:
            ready = all(feature.ready() for feature in req.features)
            if not ready or not self.lifecycle.slots.can_hold(combined_cost(req.features).slot):
                return None
        prefix = self.kv.match(req)
        return None if self.kv.must_await(req, prefix) else prefix

    def _order(self) -> Sequence[int]:
        view = WaitingView(self.lifecycle.waiting, self.kv)
        try:
            return checked_order(self.policy.order(view), len(view))
        except InvalidOrder as error:
            logger.error("schedule policy: its answer is not an order: %s; first come, first served", error)
        except Exception:
            # A user's own policy may raise anything; requests must not suffer for it.
            logger.exception("schedule policy raised; first come, first served")
        return range(len(view))

    # -- launch and commit ----------------------------------------------------------------------------------

    def _launch(self, batch: ScheduleBatch) -> None:
        self.num_steps += 1
        self.capacity.note_step()
        plan = batch.launch(self.num_steps, self.kv)
        handle = self.executor.launch(plan)
        batch.publish_prefills(self.kv)
        if plan.defer_sampling:  # its masks need the tokens of every earlier step
            self._commit_down_to(0)
            self.executor.sample(handle, batch.masks())
        self.in_flight.append((batch, handle))

    def _commit_oldest(self) -> None:
        """Apply a finished step. What was computed for a stay that has ended is dropped."""
        batch, handle = self.in_flight.popleft()
        result = handle.result()
        tokens = unpack_ids(result.tokens)
        held = batch.still_held()
        n = len(batch.order) - len(batch.loose)
        self._commit_singles(batch.order[:n], tokens[:n], held[:n])
        if batch.loose:
            self._commit_loose(batch.loose, held[n:], LooseResults(batch, result, tokens))

    def _commit_singles(self, rows: RowArray, tokens: IntArray, held: BoolArray) -> None:
        if not held.all():
            rows = rows[held]
            tokens = tokens[held]
        if not len(rows):
            return
        self.step_log.note_tokens(len(rows))
        ended, stopped = self.rows.append_one(rows, tokens)
        self.output.add_each(self.rows.handle[rows], tokens)
        for row, by_stop in zip(ended.tolist(), stopped.tolist(), strict=True):
            req = self.rows.tenant[row]
            assert req is not None
            self._finish_at_end(req, by_stop)

    def _commit_loose(self, loose: list[ScheduledRow], held: BoolArray, results: LooseResults) -> None:
        for scheduled, is_held in zip(loose, held.tolist(), strict=True):
            ids, logprobs = results.take_next(scheduled)
            if not is_held or not scheduled.samples:
                continue
            try:
                self._commit_row(scheduled, ids, logprobs)
            except RequestError as error:
                self.lifecycle.finish(scheduled.req, "error", error=error_info(error))

    def _commit_row(self, scheduled: ScheduledRow, ids: list[int], logprobs: RowLogprobs | None) -> None:
        req, row = scheduled.req, scheduled.row
        ids = req.cut(ids)
        for feature in req.features:
            ids = feature.accept(Sampled(ids, logprobs))
        self.rows.append(row, ids)
        if scheduled.guesses:  # KV of rejected ones is overwritten by the next step
            self.rows.kv_len[row] = scheduled.start + scheduled.num_known + len(ids) - 1
        self.output.add(req.handle, ids)
        self.step_log.note_tokens(len(ids))
        by_stop = req.stops_at(ids[-1], req.num_tokens - 1)
        if by_stop or req.num_tokens >= req.max_len:
            self._finish_at_end(req, by_stop)

    def _finish_at_end(self, req: Request, by_stop: bool) -> None:
        if by_stop:
            self.lifecycle.finish(req, "stop", stop_token=req.tokens.item(-1))
        else:
            self.lifecycle.finish(req, "length")

    # -- the end of everything ------------------------------------------------------------------------------

    def fail_all(self, error: ErrorInfo) -> None:
        """End every live request; what is in flight is not waited for."""
        self.in_flight.clear()
        for req in list(self.lifecycle.requests.values()):
            self.lifecycle.finish(req, "error", error=error)
        self.output.flush()
