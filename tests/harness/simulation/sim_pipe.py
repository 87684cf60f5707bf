"""Checks of the steps of a pipeline: every stage must be able to compute them at the same time."""

from __future__ import annotations

import numpy as np

from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan
from scheduler_proc.scheduler import Scheduler


class PipeWatch:
    """Told of every launch and turn; raises AssertionError when the pipe drains, or has a row twice."""

    def __init__(self, scheduler: Scheduler, num_stages: int, feeds_back: bool) -> None:
        self._scheduler = scheduler
        self._rows = scheduler.rows
        self._num_stages = num_stages
        self._most_of_a_row = 1 + feeds_back
        self._num_before = (0, 0)
        self._num_decoding = 0
        self._has_built = False
        self._sampled_in = np.zeros(self._rows.max_rows, np.int64)
        self._stay = np.zeros(self._rows.max_rows, np.int64)
        self.num_shared = 0
        """Steps that several micro-batches shared the pipe with."""

    def begin(self) -> None:
        self._num_before = (self._scheduler.num_steps, self._scheduler.num_committed)
        self._has_built = False

    def note_build(self) -> None:
        """A batch is about to be put together, of those that run now; some may be taken back for others."""
        self._has_built = True
        rows, running = self._rows, self._rows.running
        goes_on = rows.num_tokens[running] + rows.in_flight[running] < rows.max_len[running]
        decoding = (rows.kv_len[running] >= rows.num_given[running]) & goes_on
        self._num_decoding = int(np.count_nonzero(decoding))

    def note_launch(self, plan: BatchPlan) -> None:
        """A plan whose rows count as launched already."""
        rows, planned = self._rows, unpack_ids(plan.rows).astype(np.intp)
        samples = np.ones(len(planned), np.bool_)
        samples[plan.num_decodes :] = unpack_ids(plan.samples) > 0
        sampled = planned[samples]
        assert (rows.in_flight[planned] <= self._most_of_a_row).all(), "a row in two steps at once"
        starts = unpack_ids(plan.starts)
        decodes = planned[starts >= rows.num_given[planned]]
        share = -(-self._num_decoding // self._num_stages)
        assert len(decodes) <= share, "more rows than a micro-batch's share"
        young = plan.step - self._num_stages
        awaited = decodes[(rows.in_flight[decodes] > 1) & (self._sampled_in[decodes] > young)]
        same = self._stay[awaited] == rows.stay[awaited]
        if len(decodes) < len(planned):
            assert not same.any(), "a prompt waits for the token of a young step"
        self._sampled_in[sampled] = plan.step
        self._stay[sampled] = rows.stay[sampled]
        self.num_shared += len(self._scheduler.in_flight) >= min(2, self._num_stages)

    def check(self) -> None:
        """A turn that found nothing to launch has committed one step, so that others stay in the pipe."""
        steps, committed = self._scheduler.num_steps, self._scheduler.num_committed
        if self._has_built and steps == self._num_before[0]:
            assert committed - self._num_before[1] <= 1, "the pipe was drained"
