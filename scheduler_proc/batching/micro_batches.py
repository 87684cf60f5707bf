"""MicroBatches: which rows share the next step of a pipeline, so that every stage has a step to compute.

With P stages P steps are computed at a time, and a row's next token needs its last one: so a step takes a
P-th of the rows that decode, those first that have waited for the longest. A row whose token comes with a
step that is still young is left to a later one, as the whole pipeline would wait for that token. Chunks of
prompts need no token and follow each other through the stages. Knows rows; knows no page.
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
        """Number of the step that sampled a token of the row last."""
        self._turn_of = np.zeros(rows.max_rows, np.int64)
        """Number of the turn that the row had last, whether it could go on in it or not."""

    def choose(self, ready: RowArray, *, others_wait: bool) -> RowArray:
        """Choose of the rows that could go on, in their order. others_wait: somebody else may get into the
        step, and would wait for its youngest token.
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
        """Take note of a step, which is launched at once."""
        self._num_steps += 1
        sampling = batch.sampling_rows()
        self._sampled_in[sampling] = self._num_steps
        self.note_turn(sampling)

    def note_turn(self, rows: RowArray) -> None:
        """Take note of rows that had their turn, also if they lack pages and could not go on: others come
        first the next time.
        """
        self._num_turns += 1
        self._turn_of[rows] = self._num_turns

    def _share(self) -> int:
        """Rows that decode in a step, at most: a P-th of all that go on decoding."""
        rows = self._rows
        running = rows.running
        predicted = rows.num_tokens[running] + rows.in_flight[running]
        decodes = (rows.kv_len[running] >= rows.num_given[running]) & (predicted < rows.max_len[running])
        return -(-int(np.count_nonzero(decodes)) // self.num_stages)

    def _are_in_two_steps(self, ready: RowArray) -> BoolArray:
        """Which of them have as many tokens in flight as they may: one, and none where the host has to know
        the last one before it plans the next.
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
