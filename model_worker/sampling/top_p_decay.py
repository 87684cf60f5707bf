"""TopPDecay: a top_p that gets smaller with each output token, and begins again after a reset id.

top_p at age n      max(top_p_min, top_p * top_p_decay ** n)
age                 output tokens since the beginning, or since the last reset id: 0 right after it
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import LongArray, SamplingColumns, take
from model_worker.sampling.row_table import RowTable
from runtime.wire.format import IntArray


class TopPDecay:
    """The age is a column on the device, counted on the stream that samples: the host may not know whether
    the token before was a reset id.
    """

    def __init__(self, columns: SamplingColumns, max_rows: int, device: Device) -> None:
        self._columns = columns
        self._reset_ids = RowTable(max_rows, device)
        self._num_reset_ids = np.zeros(max_rows, np.int64)

    def open_row(self, row: int, reset_ids: IntArray) -> None:
        """Begin a stay; its age is among the columns."""
        self._num_reset_ids[row] = len(reset_ids)
        self._reset_ids.put(row, reset_ids.reshape(1, -1))

    def top_p(self, rows: Tensor) -> Tensor:
        """What top_p is at the age of rows [n], float32; of a row without a decay, its top_p."""
        c = self._columns
        # In float64, so that rounding it gives the same number on every device.
        factor = take(c.top_p_decay, rows).double() ** take(c.top_p_age, rows)
        return torch.maximum(take(c.top_p_min, rows), (take(c.top_p, rows) * factor).float())

    def count(self, rows: Tensor, tokens: Tensor, rows_host: LongArray) -> None:
        """Count one sampled token for each of rows [n], which differ; both int64."""
        num_reset_ids = int(self._num_reset_ids[rows_host].max())
        reset_ids = self._reset_ids.take(rows, 1, num_reset_ids)[:, 0]
        is_reset = (reset_ids == tokens.unsqueeze(1)).any(dim=1)
        age = self._columns.top_p_age
        age[rows] = (age[rows] + 1).masked_fill_(is_reset, 0)
