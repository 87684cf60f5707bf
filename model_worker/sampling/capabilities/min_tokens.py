"""MinTokens: forbids stop ids before a number of tokens."""

from __future__ import annotations

from torch import Tensor

from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.forbid import Forbidden, by_owner
from model_worker.sampling.row_table import RowTable
from model_worker.sampling.step import SamplingStep, StepRows
from runtime.sampling.features import MIN_LEN
from runtime.wire.plan import RowSetup


class MinTokens(SamplingCapability):
    """Forbids stop ids below a row's minimum length. stop_ids [max_rows, 1, width] int32."""

    bits = MIN_LEN

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context)
        self._stop_ids = RowTable(context.max_rows, context.device)

    def open_row(self, setup: RowSetup) -> None:
        """Begin a stay of a row that needs this. See SamplingCapability."""
        stop_ids = self._context.columns.known_ids(setup.stop_ids)
        self._stop_ids.put(setup.row, stop_ids.reshape(1, -1))

    def _short(self, step: SamplingStep) -> StepRows:
        selected = step.rows_with(MIN_LEN)
        return selected.where(
            selected.positions_host < self._context.columns.host["min_len"][selected.rows_host]
        )

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Forbid the stop ids of rows that are too short. Other ids must be left."""
        short = self._short(step)
        if len(short):
            self._context.ops.forbid_below(logits, short, self._stop_ids)

    def find(self, step: SamplingStep) -> Forbidden | None:
        """Return the stop ids of rows that are too short."""
        short = self._short(step)
        if not len(short):
            return None
        return by_owner(short.at, self._stop_ids.take(short.rows)[:, 0].long())

    def close_row(self, row: int) -> None:
        """End the stay of a row's holder. See SamplingCapability."""
        self._stop_ids.clear(row)
