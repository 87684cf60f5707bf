"""MicroBatches: divides decoding rows among the steps of a pipeline, so that every stage has a step to
compute.

With P stages, P steps are in flight, and a row's next token needs the result of its last one. So each step
takes 1/P of the decoding rows, those first that have waited longest. A row whose last token is still being
computed by a recent step is left to a later step, because the whole pipeline would wait for that token.
Chunks of prompts need no token, so they follow each other through the stages. Knows rows, but no pages.
"""

from __future__ import annotations

import numpy as np

from runtime.wire.format import BoolArray
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.row_columns import RowArray
from scheduler_proc.core.rows import Rows


class MicroBatches:
    def __init__(self, rows: Rows, num_stages: int) -> None:
        self.num_stages = num_stages
        self._rows = rows
        self._num_steps = self._num_turns = 0
        self._sampled_in = np.zeros(rows.max_rows, np.int64)
        """Number of the step that last sampled a token of each row."""
        self._turn_of = np.zeros(rows.max_rows, np.int64)
        """Number of the last turn of each row, whether or not it could continue then."""

    def choose(self, ready: RowArray, *, others_wait: bool) -> RowArray:
        """Return the rows of `ready` that join the next step, in their order. others_wait: other requests may
        join the step too, and would wait for its youngest token.
        """
        rows = self._rows
        ready = ready[~self._are_in_two_steps(ready)]
        is_decode = rows.kv_len[ready] >= rows.num_given[ready]
        decodes = ready[is_decode]
        if not len(decodes):
            return ready
        sampled_in = self._sampled_in[decodes]
        order = np.argsort(self._turn_of[decodes], kind="stable")
        youngest = self._num_steps + 1 - self.num_stages
        if len(decodes) == len(ready) and not others_wait:
            youngest = max(youngest, sampled_in.item(order.item(0)))
        has_come: BoolArray = (rows.in_flight[decodes] == 0) | (sampled_in <= youngest)
        order = order[has_come[order]][: self._share()]
        is_chosen = ~is_decode
        is_chosen[np.flatnonzero(is_decode)[order]] = True
        return ready[is_chosen]

    def note_step(self, batch: ScheduleBatch) -> None:
        """Record a step that is launched now."""
        self._num_steps += 1
        sampling = batch.sampling_rows()
        self._sampled_in[sampling] = self._num_steps
        self.note_turn(sampling)

    def note_turn(self, rows: RowArray) -> None:
        """Record that these rows had their turn, even if they lacked pages, so that other rows come first
        next time.
        """
        self._num_turns += 1
        self._turn_of[rows] = self._num_turns

    def _share(self) -> int:
        """Return how many rows may decode in one step: 1/P of all decoding rows, rounded up. Rows that
        sit out are not among them.
        """
        rows = self._rows
        running = rows.running
        predicted = rows.num_tokens[running] + rows.in_flight[running]
        decodes = (rows.kv_len[running] >= rows.num_given[running]) & (predicted < rows.max_len[running])
        if rows.num_sitting:
            decodes &= ~rows.sits[running]
        return -(-int(np.count_nonzero(decodes)) // self.num_stages)

    def _are_in_two_steps(self, ready: RowArray) -> BoolArray:
        """Return a mask of the rows that must wait for a result: those with two tokens in flight, and those
        with one whose next step can only be planned when the host knows that token.
        """
        rows = self._rows
        in_flight = rows.in_flight[ready]
        are: BoolArray = in_flight > 1
        for at in np.flatnonzero((in_flight == 1) & rows.needs_python[ready]).tolist():
            row = ready.item(at)
            req = rows.holder[row]
            are[at] = rows.is_planned_when_committed(row) or (
                req is not None and (req.guide is not None or req.processing is not None)
            )
        return are
