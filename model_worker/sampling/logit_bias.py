"""LogitBias: what is added to the logits of a row's listed ids, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.row_table import RowTable
from runtime.wire.format import FloatArray, IntArray


class LogitBias:
    """entries [max_rows, 2, width] int32: ids, then the bits of their float32 values."""

    def __init__(self, max_rows: int, device: Device) -> None:
        self._entries = RowTable(max_rows, device)

    def open_row(self, row: int, ids: IntArray, values: FloatArray) -> None:
        """Begin a stay; there may be no ids. None of them comes twice."""
        self._entries.put(row, np.stack([ids, values.view(np.int32)]))

    def apply(self, logits: Tensor, at: Tensor, rows: Tensor) -> None:
        """Add to logits[at] [S, V] in place; at [n] and rows [n] int64."""
        ids, bits = self._entries.take(rows).unbind(1)
        index = at.unsqueeze(1) * logits.shape[1] + ids.clamp_min(0)
        values = bits.contiguous().view(torch.float32).masked_fill(ids < 0, 0.0)
        logits.view(-1).index_put_((index,), values, accumulate=True)

    def apply_by_kernel(self, logits: Tensor, rows: Tensor) -> None:
        """The same for all rows [S] of logits [S, V], in one launch."""
        from model_worker.sampling.triton.logit_edits import add_bias

        add_bias(logits, rows, self._entries.values)
