"""Committer: applies the results of a step to its requests. It launches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from runtime.wire.format import BoolArray, IntArray, unpack_ids
from runtime.wire.plan import StepResult
from scheduler_proc.cache.group_pages import advance_group
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.executor import StepHandle
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request, RowGroup
from scheduler_proc.core.results import LooseResults
from scheduler_proc.core.row_columns import RowArray, all_of
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.observe.step_stats import StepStats

MAX_HOLD_S = 4.0
"""Seconds for which a group whose masks are late keeps its places while others wait. It begins again when it
gets places, and keeps them for twice as long then: its masks may always take that long.
"""
MOST_DOUBLINGS = 6


class Committer:
    """Appends sampled tokens to requests, and ends those that are complete."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        step_log: StepLog,
        stats: StepStats,
        now_s: Callable[[], float],
        await_masks: Callable[[Sequence[RowGroup]], None],
        may_anybody_start: Callable[[], bool],
    ) -> None:
        """await_masks: called with the groups that have got all their results in a step. may_anybody_start:
        returns True if a waiting request could start if it had rows and pages.
        """
        self.lifecycle = lifecycle
        self.kv = lifecycle.kv
        self.rows = lifecycle.kv.rows
        self.output = lifecycle.output
        self.step_log = step_log
        self.stats = stats
        self._now_s = now_s
        self._await_masks = await_masks
        self._may_anybody_start = may_anybody_start
        self._held: dict[RowGroup, float] = {}
        """Groups that have all their results, while it is not known yet how they continue, and times up to
        which they keep their places.
        """
        self._complete: list[RowGroup] = []
        """Groups that got the last of their results in the step being committed."""

    def commit(self, batch: ScheduleBatch, result: StepResult, handle: StepHandle) -> None:
        """Apply the result of a finished step. Tokens for a row whose request has left it are dropped."""
        tokens = unpack_ids(result.tokens)
        held = batch.still_held()
        n = len(batch.decodes) + len(batch.single)
        self._commit_singles(batch.order[:n], tokens[:n], held[:n], batch.step)
        if batch.guesses is not None:
            counts = unpack_ids(result.counts)[len(batch.single) :][: len(batch.guesses.rows)]
            num_before, n = n, n + len(counts)
            tokens = tokens[num_before:]
            num_sampled = int(counts.sum())
            self._commit_guesses(batch, tokens[:num_sampled], counts, held[num_before:n])
            tokens = tokens[num_sampled:]
        else:
            tokens = tokens[n:]
        if batch.loose:
            frames = handle.frames if result.tensors else ()
            self._commit_loose(batch.loose, held[n:], LooseResults(batch, result, tokens, frames))

    def _commit_singles(self, rows: RowArray, tokens: IntArray, held: BoolArray, step: int) -> None:
        if not all_of(held):
            rows = rows[held]
            tokens = tokens[held]
        if not len(rows):
            return
        self.step_log.note_tokens(len(rows))
        ended, stopped = self.rows.append_one(rows, tokens)
        if self.rows.timed:
            self.rows.note_time(rows, self._now_s(), step)
        self.output.add_each(self.rows.handle[rows], tokens)
        for row, by_stop in zip(ended.tolist(), stopped.tolist(), strict=True):
            req = self.rows.holder[row]
            assert req is not None
            self._finish_at_end(req, by_stop)

    def _commit_guesses(
        self, batch: ScheduleBatch, tokens: IntArray, counts: IntArray, held: BoolArray
    ) -> None:
        """Do what `_commit_row` does, for all rows at once whose only feature is guesses."""
        guesses = batch.guesses
        assert guesses is not None
        rows, starts, num_drafted = guesses.rows, guesses.starts, guesses.counts
        if not all_of(held):
            tokens = tokens[np.repeat(held, counts)]
            rows, starts, num_drafted, counts = rows[held], starts[held], num_drafted[held], counts[held]
        if not len(rows):
            return
        kept, tokens, ended, stopped = self.rows.append_several(rows, tokens, counts)
        num_accepted = kept - 1
        self._take_back_rejected(rows, starts, num_drafted, num_accepted)
        self.rows.num_accepted[rows] += num_accepted
        self.stats.drafts.note_rows(num_drafted, num_accepted)
        self.output.add_each(self.rows.handle[rows].repeat(kept), tokens)
        self.step_log.note_tokens(len(tokens))
        guesser = self.rows.guesser
        assert guesser is not None
        guesser.note(rows, num_drafted, num_accepted)
        for at in ended.nonzero()[0].tolist():
            req = self.rows.holder[rows.item(at)]
            assert req is not None
            self._finish_at_end(req, stopped.item(at))

    def _take_back_rejected(
        self, rows: RowArray, starts: IntArray, num_drafted: IntArray, num_accepted: IntArray
    ) -> None:
        """Set the lengths back to before rejected guesses. The next step overwrites their KV."""
        rejected = num_accepted < num_drafted
        if not np.count_nonzero(rejected):
            return
        rows = rows[rejected]
        self.rows.kv_len[rows] = starts[rejected] + 1 + num_accepted[rejected]
        self.kv.give_back_rejected(rows)

    def _commit_loose(
        self, loose: list[ScheduledRow[Request]], held: BoolArray, results: LooseResults
    ) -> None:
        for scheduled, is_held in zip(loose, held.tolist(), strict=True):
            sampled, prompt = results.take_next(scheduled)
            if not is_held:
                continue
            try:
                if prompt is not None:
                    for feature in scheduled.req.features:
                        feature.accept_prompt(prompt)
                if scheduled.samples:
                    self._commit_row(scheduled, sampled)
            except RequestError as error:
                self.lifecycle.finish(scheduled.req.head, "error", error=error_info(error))
        if self._complete:
            complete, self._complete = self._complete, []
            complete = [group for group in complete if group.has_all()]
            for group in complete:
                group.announce()
            self._await_masks(complete)
            now_s = self._now_s()
            for group in complete:
                if group.has_all() and not self._continues(group):
                    num_doublings = min(group.head.num_retractions, MOST_DOUBLINGS)
                    self._held[group] = now_s + MAX_HOLD_S * 2**num_doublings

    def _commit_member(self, member: Request, group: RowGroup, sampled: Sampled) -> None:
        """Keep the result of one row of a group. Once all rows have theirs, the group continues or ends."""
        self.rows.in_flight_of[member.row] -= 1
        if member is group.head:
            for feature in member.features:
                feature.accept(sampled)
        group.take(member, sampled)
        if group.has_all():
            self._complete.append(group)

    def _continues(self, group: RowGroup) -> bool:
        """Continue or end a group. Returns False if it is not known yet how it continues."""
        try:
            num_results, beams = len(group.beams), group.next_beams()
            if beams is None:
                return False
            self.step_log.note_tokens(num_results)
            if beams:
                advance_group(self.kv, group, beams)
            else:
                self.lifecycle.finish(group.head, "stop")
        except RequestError as error:
            self.lifecycle.finish(group.head, "error", error=error_info(error))
        return True

    def continue_held(self) -> None:
        """Continue the held groups whose next beams are known by now, and retract those that are held for too
        long, if this lets somebody start. A group that has lost its rows meanwhile starts again.
        """
        if not self._held:
            return
        held, self._held = self._held, {}
        may_retract = True
        for group, until_s in held.items():
            if not group.has_all() or self._continues(group):
                continue
            is_over = self._now_s() >= until_s
            may_retract = may_retract and (not is_over or self._may_anybody_start())
            if is_over and may_retract:
                self.lifecycle.retract(group.head)
            else:
                self._held[group] = until_s

    def _commit_row(self, scheduled: ScheduledRow[Request], sampled: Sampled) -> None:
        req, row = scheduled.req, scheduled.row
        if req.group is not None:
            self._commit_member(req, req.group, sampled)
            return
        ids = req.cut(sampled.ids)
        for feature in req.features:
            ids = feature.accept(sampled if ids is sampled.ids else sampled._replace(ids=ids))
        if not ids:
            self.lifecycle.finish(req, "stop")
            return
        num_tokens = self.rows.append(row, ids)
        if num_guesses := sampled.num_guesses:
            num_accepted = len(ids) - 1
            if num_accepted < num_guesses:  # KV of rejected ones is overwritten by the next step
                self.rows.kv_len_of[row] = scheduled.start + scheduled.num_known + num_accepted
                self.kv.give_back_rejected(np.array([row]))
            self.rows.num_accepted_of[row] += num_accepted
            self.stats.drafts.note_row(num_guesses, num_accepted)
        self.output.add(req.handle, ids)
        self.step_log.note_tokens(len(ids))
        by_stop = req.stops_at(ids[-1], num_tokens - 1)
        if by_stop or num_tokens >= req.max_len:
            self._finish_at_end(req, by_stop)
        elif scheduled.is_prefill and req.features:
            self.rows.settle(req)

    def _finish_at_end(self, req: Request, by_stop: bool) -> None:
        if by_stop:
            self.lifecycle.finish(req, "stop", stop_token=req.tokens.item(-1))
        else:
            self.lifecycle.finish(req, "length")
