"""MaskGatherer: gathers the masks of a launched step, and decides what becomes of rows without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from runtime.wire.plan import SampleMasks
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request, RowGroup
from scheduler_proc.core.scheduled_row import NoMask, ScheduledRow
from scheduler_proc.core.sitting_rows import SittingRows
from scheduler_proc.observe.step_stats import StepStats
from scheduler_proc.port import Readiness


class NumberedMasks(Protocol):
    """Masks of a step's rows that are named by slot numbers."""

    @property
    def memory_name(self) -> str: ...

    def note_launch(self, step: int) -> None:
        """Record that a step is about to be launched with these slot numbers."""

    def note_commit(self, step: int) -> None:
        """Record that a step, and all before it, has been computed."""


class StepPatience(Protocol):
    """Limit of the time for which a step waits for masks; see MaskPatience."""

    def begin(
        self, now_s: float, num_masks: int, is_idle: Callable[[], bool], *, has_others: bool
    ) -> None: ...

    def hurry(self) -> None: ...

    def end(self, now_s: float) -> None: ...


class MaskSource(Protocol):
    """Source of masks; see GrammarClient."""

    @property
    def slots(self) -> NumberedMasks | None: ...

    @property
    def patience(self) -> StepPatience: ...

    @property
    def has_sent_news(self) -> bool:
        """True if nothing waits to be sent to the grammar process."""

    def send_news(self) -> None:
        """Ask for the masks behind all tokens and guesses that are known."""

    def look(self) -> None:
        """Take the answers that have arrived."""


def _must_be_there(scheduled: ScheduledRow[Request]) -> bool:
    """Return True if a step does not wait for a row's masks once the worker has nothing else to compute."""
    return scheduled.is_on_trial if scheduled.guesses else scheduled.sits_out


class MaskGatherer:
    def __init__(
        self,
        lifecycle: Lifecycle,
        stats: StepStats,
        now_s: Callable[[], float],
        is_ready: Callable[[Readiness], bool],
    ) -> None:
        """now_s, is_ready: as in Port."""
        self._lifecycle = lifecycle
        self._stats = stats
        self._now_s = now_s
        self.sitting = SittingRows(lifecycle, is_ready, now_s)
        self.source: MaskSource | None = None
        """Set where guides are served."""

    def look(self) -> None:
        """Take what the grammar process has sent. Called now and then, because while nobody has a guide only
        this finds answers about sequences that others have opened there, and has them closed.
        """
        if self.source is not None:
            self.source.look()

    @property
    def has_sent_news(self) -> bool:
        """True if nothing waits to be sent to the source of masks."""
        return self.source is not None and self.source.has_sent_news

    def gather(self, batch: ScheduleBatch, is_idle: Callable[[], bool]) -> SampleMasks:
        """Return the masks that a step waits for. A row whose mask is late is taken back out of the step, and
        sits out. A request whose guide is complete, or fails, ends here. is_idle: as in StepPatience.
        """
        masks: list[tuple[int, bytes | int]] = []
        source, memory = self.source, ""
        if source is not None and source.slots is not None:
            source.slots.note_launch(batch.step)
            memory = source.slots.memory_name
        began_s = self._now_s()
        # Those that are awaited come first. Meanwhile the masks of the others may come, too.
        masked = sorted(batch.masked(), key=_must_be_there)
        if masked and source is not None:
            awaited = [scheduled for scheduled in masked if not _must_be_there(scheduled)]
            num_masks = len(awaited) + sum(len(scheduled.guesses) for scheduled in awaited)
            source.patience.begin(began_s, num_masks, is_idle, has_others=self._has_others(batch, masked))
        for scheduled in masked:  # all of them, before the first wait
            if scheduled.guesses and scheduled.note_guesses is not None:
                scheduled.note_guesses(scheduled.guesses)
        if masked and source is not None:
            source.send_news()
            self._lifecycle.output.flush()  # what has come does not wait for masks, too
        for scheduled in masked:
            req, make_masks = scheduled.req, scheduled.make_masks
            assert make_masks is not None
            if source is not None and _must_be_there(scheduled):
                source.patience.hurry()
            try:
                made = make_masks(len(scheduled.guesses))
            except RequestError as error:
                self._lifecycle.finish(req, "error", error=error_info(error))
                continue
            if made is NoMask.COMPLETE:
                self._lifecycle.finish(req, "stop")
            elif made is NoMask.LATE:
                self._stats.num_late_masks += 1
                if scheduled.is_prefill or scheduled.masked_by is None:
                    self._lifecycle.retract(req)  # results for the prompt would be lost with the step
                else:
                    self.sitting.take_back(scheduled, batch)
            else:
                masks += [(req.row, mask) for mask in made]
                if scheduled.sits_out:
                    self.sitting.add(scheduled)
        now_s = self._now_s()
        self._stats.mask_wait_s += now_s - began_s
        if masked and source is not None:
            source.patience.end(now_s)
        return SampleMasks(batch.step, tuple(masks), batch.processed(), memory)

    def _has_others(self, batch: ScheduleBatch, masked: Sequence[ScheduledRow[Request]]) -> bool:
        """Return True if a running row needs no mask, or is of another tenant than the rows with masks. It
        waits, too, wherever it is: sitting out, or in another step of a pipeline.
        """
        tenant = masked[0].req.tenant
        if len(batch.order) > len(masked) or any(each.req.tenant != tenant for each in masked):
            return True
        return len(self._lifecycle.kv.rows.running) > len(masked) and self._runs_beside(tenant)

    def _runs_beside(self, tenant: str) -> bool:
        """Return True if a running request has no guide, or is of another tenant."""
        running = self._lifecycle.kv.rows.running_requests()
        return any(req.guide is None or req.tenant != tenant for req in running)

    def await_groups(self, groups: Sequence[RowGroup]) -> None:
        """Wait for the masks of groups that have all their results, for all of them together. While its masks
        are late a group is not planned, since its next tokens are not known. Nobody waits for those that were
        late lately.
        """
        masked = [(group, group.masked_by) for group in groups if group.masked_by is not None]
        awaited = [(group, masks) for group, masks in masked if masks.is_awaited and not masks.is_known()]
        if not awaited or self.source is None:
            return
        num_masks = sum(len(group.beams) for group, _ in awaited)
        has_others = self._runs_beside(awaited[0][0].head.tenant)
        began_s = self._now_s()
        self.source.patience.begin(began_s, num_masks, lambda: True, has_others=has_others)
        self._lifecycle.output.flush()
        for _, masks in awaited:
            self._stats.num_late_masks += not masks.wait()
        now_s = self._now_s()
        self._stats.mask_wait_s += now_s - began_s
        self.source.patience.end(now_s)

    def note_commit(self, step: int) -> None:
        """Record that a step, and all before it, has been computed."""
        if self.source is not None and self.source.slots is not None:
            self.source.slots.note_commit(step)
