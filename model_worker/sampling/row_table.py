"""RowTable: a short list of id sequences for each row, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.wire.format import IntArray

PADDING = -1


class RowTable:
    """Table values [max_rows, n, width] int32 contiguous, with PADDING where a row has fewer.

    Allocated when first needed, and again with twice the size when a row has more than fits. Most launches
    never need it, and a request may have many more ids than requests usually have.
    """

    def __init__(self, max_rows: int, device: Device) -> None:
        self._device = device
        self.values = self._allocate(max_rows, 0, 0)

    def _allocate(self, max_rows: int, n: int, width: int) -> Tensor:
        return torch.full((max_rows, n, width), PADDING, dtype=torch.int32, device=self._device.torch_device)

    def put(self, row: int, values: IntArray) -> None:
        """Replace the row's content by values [n, width]."""
        n, width = values.shape
        self._reserve(n, width)
        self.clear(row)
        self.values[row, :n, :width] = self._device.tensor(values)

    def clear(self, row: int) -> None:
        """Clear the row."""
        self.values[row].fill_(PADDING)

    def _reserve(self, n: int, width: int) -> None:
        max_rows, old_n, old_width = self.values.shape
        if n <= old_n and width <= old_width:
            return
        grown = self._allocate(max_rows, max(old_n, _power_of_two(n)), max(old_width, _power_of_two(width)))
        grown[:, :old_n, :old_width] = self.values
        self.values = grown

    def take(self, rows: Tensor, n: int | None = None, width: int | None = None) -> Tensor:
        """Return the first n sequences of rows [m], with their first `width` ids, [m, n, width] int32; None:
        all.
        """
        return self.values[:, :n, :width].index_select(0, rows)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
