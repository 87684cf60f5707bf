"""Scheduler: the sequence of one step. Each part that it calls owns its own state; no feature is named here.

drain inbox → build batch (see BatchBuilder) → launch
            → [sample, once masks are known] → commit the oldest step (while the newest runs)
            → flush one TokenBatch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from runtime.wire.messages import ErrorInfo, ToScheduler
from scheduler_proc.batching.batch_builder import BatchBuilder
from scheduler_proc.batching.prefill_adder import PrefillTotals
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.committer import Committer
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.executor import AnyExecutor, StepHandle
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.features.speculation.step_cost import StepCost
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.intake import Intake
from scheduler_proc.mask_gatherer import MaskGatherer
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.port import Port


class Scheduler:
    """Runs steps: it launches the next step, and then commits the oldest one."""

    def __init__(
        self,
        port: Port,
        lifecycle: Lifecycle,
        intake: Intake,
        builder: BatchBuilder,
        executor: AnyExecutor,
        step_log: StepLog,
        controls: Controls,
        step_cost: StepCost | None = None,
    ) -> None:
        """step_cost: learns how long steps take; None if no request may guess."""
        self.port = port
        self.lifecycle = lifecycle
        self.intake = intake
        self.controls = controls
        self.profile = controls.profile
        self.builder = builder
        self._is_pipeline = builder.micro_batches is not None
        self.capacity = builder.capacity
        self.executor = executor
        self.step_log = step_log
        self.step_cost = step_cost
        self.questions = controls.questions
        self.stats = controls.questions.stats
        self.kv: KVCacheManager = lifecycle.kv
        self.rows = lifecycle.kv.rows
        self.output = lifecycle.output
        self.masks = MaskGatherer(lifecycle, self.stats, port.now_s, port.is_ready)
        self.committer = Committer(
            lifecycle,
            step_log,
            self.stats,
            port.now_s,
            self.masks.await_groups,
            builder.admission.has_prepared,
        )
        self.in_flight: deque[tuple[ScheduleBatch, StepHandle]] = deque()
        self.num_steps = 0
        """Number of steps launched since the start."""
        self.num_committed = 0
        """Number of steps committed since the start."""
        self._committed_s = 0.0

    @property
    def is_idle(self) -> bool:
        """True if no request is live, no step is in flight and everything has been sent."""
        return not (
            self.lifecycle.requests or self.in_flight or self.output.is_blocked or self.controls.calls.is_open
        )

    @property
    def waits_for_masks(self) -> bool:
        """True if nobody but the grammar process and the clients can help the live requests: the last step
        took all masks that had come, and what they are made from was sent.
        """
        waits_for_others = (
            self.output.is_blocked or self.controls.calls.is_open or self.lifecycle.slots.num_loading
        )
        return self.port.has_looked_for_masks and self.masks.has_sent_news and not waits_for_others

    @property
    def has_given_way(self) -> bool:
        """True if the engine gives way to another one, and everything that it has computed has been sent."""
        return self.controls.gives_way and not (self.in_flight or self.output.is_blocked)

    # -- one step -------------------------------------------------------------------------------------------

    def step(self, inbox: Iterable[ToScheduler]) -> bool:
        """Run one step of the loop. Returns True if it launched or committed anything.

        While a detokenizer refuses output, generation is paused or a call to ranks is open, no step is
        launched. Messages are still applied and steps in flight committed, so memory stays bounded by the
        live requests. Raises ExecutorError when the executor has become unusable. The requests are then
        unchanged, and the caller decides about them.
        """
        self.port.begin_turn()
        self.profile.begin()
        for message in inbox:
            self.intake.receive(message)
        self._receive_adapters()
        self.lifecycle.tick()
        self.profile.mark("receive")
        self.controls.calls.take_answers()
        # With a step in flight, openings go with the tokens that are committed in this turn, in one message.
        # A step that is launched now for what they open is committed in a later turn, behind them.
        may_launch = self.output.flush(holds_openings=bool(self.in_flight)) and self.controls.may_launch
        worked = self._launch_and_commit() if may_launch else self._commit_down_to(0)
        if worked and self.questions.num_waiting:
            self.questions.answer_waiting()
        self.output.flush()
        self.profile.mark("flush")
        self.profile.end_turn()
        return worked

    def _receive_adapters(self) -> None:
        slots = self.lifecycle.slots
        if slots.device is not None and slots.num_loading:
            for answer in self.port.adapter_answers(slots.device):
                slots.receive(answer)

    def _launch_and_commit(self) -> bool:
        worked = not self._is_pipeline and self.rows.must_commit_first and self._commit_down_to(0)
        self.masks.sitting.look()
        self.committer.continue_held()
        self.lifecycle.solitary.is_settled = not self.in_flight
        batch, totals = self.builder.build(self.executor.feeds_back)
        self.profile.mark("build")
        num_rows = len(batch)
        self.step_log.note_batch(num_rows, totals)
        if not num_rows:
            return self._commit_one() or worked
        self._launch(batch, totals)
        self._commit_down_to(self.executor.max_in_flight - 1)
        return True

    def _commit_one(self) -> bool:
        """Commit the oldest step by itself, so that its rows can be planned while other steps
        are computed.
        """
        return self._commit_down_to(max(0, len(self.in_flight) - 1))

    def _commit_down_to(self, num_in_flight: int) -> bool:
        worked = len(self.in_flight) > num_in_flight
        while len(self.in_flight) > num_in_flight:
            self._commit_oldest()
        return worked

    # -- launch and commit ----------------------------------------------------------------------------------

    def _launch(self, batch: ScheduleBatch, totals: PrefillTotals) -> None:
        self.num_steps += 1
        self.capacity.note_step()
        if self.step_cost is not None:
            batch.launched_s = self.port.now_s()
        plan = self.profile.with_profiling(batch.launch(self.num_steps, self.kv))
        self.lifecycle.roster.note_step()
        handle = self.executor.launch(plan)
        self.stats.note_launch(self.num_steps, batch, totals)
        batch.publish_prefills(self.kv)
        if plan.defer_sampling:
            self._commit_for_masks(batch)
            masks = self.masks.gather(batch, lambda: self.port.waits_for_masks(handle))
            self.executor.sample(handle, masks)
        self.in_flight.append((batch, handle))
        self.profile.mark("launch", step=self.num_steps, num_rows=len(batch.order))

    def _commit_for_masks(self, batch: ScheduleBatch) -> None:
        """Commit the earlier steps whose tokens the masks of this batch depend on. Rows without tokens in
        flight need none.
        """
        while self.in_flight and batch.waits_for_tokens():
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        """Commit the oldest step in flight. Tokens for a row whose request has left it are dropped."""
        batch, handle = self.in_flight.popleft()
        result = self.port.result(handle)
        self.profile.mark("wait", step=result.step)
        self.profile.note_result(result)
        if self.step_cost is not None:
            self._note_cost(batch, self.step_cost)
        num_before = self.step_log.num_tokens
        self.masks.note_commit(batch.step)
        self.lifecycle.roster.note_step_end()
        self.committer.commit(batch, result, handle)
        self.num_committed += 1
        self.stats.note_commit(batch, self.step_log.num_tokens - num_before)
        self.profile.note_step(result.step, *self.stats.last_step_s)
        self.profile.mark("commit", step=result.step)

    def _note_cost(self, batch: ScheduleBatch, step_cost: StepCost) -> None:
        now = self.port.now_s()
        if not batch.has_prefill:
            seconds = now - max(batch.launched_s, self._committed_s)
            step_cost.note_step(len(batch), batch.num_guesses, seconds)
        self._committed_s = now

    # -- the end of everything ------------------------------------------------------------------------------

    def fail_all(self, error: ErrorInfo) -> None:
        """End every live request with an error, without waiting for steps in flight."""
        self.lifecycle.roster.note_step_end(len(self.in_flight))
        self.in_flight.clear()
        self.stats.forget_in_flight()
        for req in list(self.lifecycle.requests.values()):
            self.lifecycle.finish(req, "error", error=error)
        self.output.flush()
