"""BatchBuilder: chooses the requests of the next step. It continues running rows, retracts rows when pages
are short, and admits waiting requests. The capacity policy decides who fits; the PrefillAdder decides how
many tokens each row gets.
"""

from __future__ import annotations

import logging

import numpy as np

from runtime.wire.messages import ErrorInfo
from scheduler_proc.batching.admission import Admission
from scheduler_proc.batching.chosen_batch import ChosenBatch
from scheduler_proc.batching.micro_batches import MicroBatches
from scheduler_proc.batching.phases import Phases
from scheduler_proc.batching.preemption import Preemption
from scheduler_proc.batching.prefill_adder import PrefillAdder, PrefillTotals, StepLimits
from scheduler_proc.capacity.base import CapacityPolicy
from scheduler_proc.core.batch import NO_ROWS, ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray, all_of

logger = logging.getLogger(__name__)


class BatchBuilder:
    """Builds the next step. Call `build` once a step."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        admission: Admission,
        capacity: CapacityPolicy,
        phases: Phases,
        limits: StepLimits,
        preemption: Preemption | None = None,
        chooser: ChosenBatch | None = None,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        """micro_batches: the division of rows among steps in a pipeline of stages; None without
        a pipeline.
        """
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._rows = lifecycle.kv.rows
        self.admission = admission
        self._phases = phases
        self._limits = limits
        self._preemption = preemption
        self._chooser = chooser
        self.micro_batches = micro_batches
        self.capacity = capacity
        self._served_at = np.zeros(self._rows.max_rows, np.int64)
        self._num_turns = 0

    def build(self, feeds_back: bool) -> tuple[ScheduleBatch, PrefillTotals]:
        """Return the next step, which the caller launches at once unless it is empty. feeds_back: as in
        Executor.
        """
        self._lifecycle.slots.begin_step()
        if self._preemption is not None:
            self._preemption.preempt()
        batch = ScheduleBatch(self._rows)
        adder = PrefillAdder(batch, self._kv, self.capacity, self._lifecycle.slots, self._limits)
        ready, newcomers = self._rows.ready(feeds_back), None
        if self.micro_batches is not None:
            ready = self.micro_batches.choose(ready, others_wait=len(self._lifecycle.waiting) > 0)
        chosen = ready
        if self._chooser is not None:
            ready, newcomers = self._chooser.choose(ready)
        for rows, admits in self._phases.of(ready):
            self._continue(rows, batch, adder)
            if admits and len(self._lifecycle.waiting) and adder.can_admit() and self.capacity.admits():
                self.admission.admit(adder, newcomers)
            if len(batch):
                break
        adder.reserve_guesses()
        if self.micro_batches is not None:
            if len(batch):
                self.micro_batches.note_step(batch)
            elif len(chosen):
                self.micro_batches.note_turn(chosen)
        return batch, adder.totals

    def _continue(self, ready: RowArray, batch: ScheduleBatch, adder: PrefillAdder) -> None:
        """Continue running rows: plain decodes all at once, then rows with guesses all at once, and the rest
        one by one.
        """
        if len(ready) > self._limits.max_requests:
            ready = self._longest_unserved(ready)
        plain = self._rows.plain_decodes(ready)
        decodes = ready[plain]
        if adder.try_continue_together(decodes):
            if len(decodes) == len(ready):  # nearly always
                return
            ready = self._continue_guessing(ready[~plain] if len(decodes) else ready, adder)
        if len(ready):
            self._continue_one_by_one(ready, batch, adder)

    def _continue_guessing(self, ready: RowArray, adder: PrefillAdder) -> RowArray:
        """Continue the rows that do nothing special but guess, all at once. Returns the rows that are still
        to be continued.
        """
        guesser = self._rows.guesser
        chosen = None if guesser is None else guesser.choose(ready)
        if guesser is None or chosen is None:
            return ready
        rows, others = (ready, NO_ROWS) if all_of(chosen) else (ready[chosen], ready[~chosen])
        return others if adder.try_continue_guessing(rows, guesser, len(others)) else ready

    def _longest_unserved(self, ready: RowArray) -> RowArray:
        """Return the max_requests rows that have gone longest without a turn, in the order of admission."""
        order = np.argsort(self._served_at[ready], kind="stable")
        chosen = ready[np.sort(order[: self._limits.max_requests])]
        self._num_turns += 1
        self._served_at[chosen] = self._num_turns
        return chosen

    # -- short of pages -------------------------------------------------------------------------------------

    def _continue_one_by_one(self, ready: RowArray, batch: ScheduleBatch, adder: PrefillAdder) -> None:
        """Continue rows one by one in the order of the capacity policy's rank, so the first ones get pages
        first. When pages are short, a row that is not in the batch yet is retracted.
        """
        holders = [req for row in ready.tolist() if (req := self._rows.holder[row]) is not None]
        in_turn = sorted(holders, key=self.capacity.rank)
        for num_taken, req in enumerate(in_turn, 1):
            adder.num_to_come = len(in_turn) - num_taken
            while req.row >= 0 and not adder.try_continue(req):
                if not self._try_make_room(batch, req, adder.num_missing):
                    break

    def _try_make_room(self, batch: ScheduleBatch, req: Request, num_missing: int) -> bool:
        """Retract one row to free pages for req, which lacks num_missing pages. Returns False if no row has
        to give way; req then waits for pages.
        """
        taken = batch.taken()
        candidates = [each for each in self._rows.running_requests() if taken.isdisjoint(each.held_rows)]
        if not candidates:
            return False
        if self._rows.num_running == 1:
            # There is no other row to wait for: the request would be retracted and admitted for ever.
            error = ErrorInfo("the KV cache is too small for this request", "kv_cache_exhausted", None, 503)
            self._lifecycle.finish(candidates[0], "error", error=error)
            return True
        victim = self.capacity.victim(self._kv.guard.victim_candidates(candidates, req, num_missing))
        if victim is None:
            return False
        self._lifecycle.retract(victim)
        self.capacity.note_retraction()
        logger.info("KV cache is full: retracted a request, %d in all", self._lifecycle.num_retracted)
        return True
