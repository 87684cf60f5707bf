"""TopPDecay: a top-p that shrinks with each output token, and starts again after a reset id.

p at age n          max(top_p_min, p * top_p_decay ** n), which the draw computes
age                 output tokens since the beginning, or since the last reset id: 0 right after it
"""

from __future__ import annotations

import numpy as np

from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.row_table import RowTable
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.sampling.features import TOP_P_DECAY
from runtime.wire.format import unpack_ids
from runtime.wire.plan import RowSetup


class TopPDecay(SamplingCapability):
    """Counts the age of rows in a column on the device, on the stream that samples, because the host may not
    know yet whether the last token was a reset id.
    """

    bits = remembered = TOP_P_DECAY

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._reset_ids = RowTable(context.max_rows, context.device)
        self._num_reset_ids = np.zeros(context.max_rows, np.int64)

    def open_row(self, setup: RowSetup) -> None:
        """Store the reset ids of a row. Its age is one of its columns."""
        reset_ids = unpack_ids(setup.top_p_reset_ids)
        self._num_reset_ids[setup.row] = len(reset_ids)
        self._reset_ids.put(setup.row, reset_ids.reshape(1, -1))

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Increase the age, or reset it."""
        selected = step.rows_with(TOP_P_DECAY)
        rows, tokens = selected.rows, sampled.tokens[selected.at]
        num_reset_ids = int(self._num_reset_ids[selected.rows_host].max())
        reset_ids = self._reset_ids.take(rows, 1, num_reset_ids)[:, 0]
        is_reset = (reset_ids == tokens.unsqueeze(1)).any(dim=1)
        age = self._context.columns.top_p_age
        age[rows] = (age[rows] + 1).masked_fill_(is_reset, 0)
