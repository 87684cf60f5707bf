"""LogitBias: adds biases to the logits of listed ids."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.row_table import RowTable
from model_worker.sampling.step import SamplingStep
from runtime.sampling.features import BIAS
from runtime.wire.format import unpack_floats, unpack_ids
from runtime.wire.plan import RowSetup


class LogitBias(SamplingCapability):
    """Adds biases. entries [max_rows, 2, width] int32: ids, then the bits of their float32 values."""

    bits = BIAS

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._entries = RowTable(context.max_rows, context.device)

    def open_row(self, setup: RowSetup) -> None:
        """Store the biases of a row. No id occurs twice."""
        ids, values = unpack_ids(setup.bias_ids), unpack_floats(setup.bias_values)
        known = self._context.columns.known(ids)
        self._entries.put(setup.row, np.stack([ids[known], values[known].view(np.int32)]))

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Change logits [S, V] float32 in place, before the draw."""
        self._context.ops.add_bias(logits, step.rows_with(BIAS), self._entries)

    def close_row(self, row: int) -> None:
        """End the stay of a row's holder. See SamplingCapability."""
        self._entries.clear(row)
