"""ReqToTokenPool: the page table on the device, by row. It is written from plans only; it knows
no request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from model_worker.device.base import Device
from runtime.wire.format import IntArray


class ReqToTokenPool:
    """page_table [max_rows + 1, max_pages] int32: the page that holds tokens i * page_size … of a row.

    The last row belongs to no request: it is the padding of a batch, and its pages are all the dummy page.

    A write is launched on the forward stream after every step that read the old entry, so the scheduler may
    give a page or a row to another request while a step is in flight.
    """

    def __init__(self, max_rows: int, max_len: int, page_size: int, device: Device) -> None:
        self.page_size = page_size
        self.max_rows = max_rows
        self.max_pages = -(-max_len // page_size)
        self.page_table = torch.zeros(
            (max_rows + 1, self.max_pages), dtype=torch.int32, device=device.torch_device
        )
        self.flat = self.page_table.view(-1)
        self._device = device

    def write(self, spans: IntArray, pages: IntArray) -> None:
        """Set page_table[row, start:start + n] to the next n pages, for each (row, start, n) of spans
        [N, 3].
        """
        index = self.entries_of(spans, len(pages))
        self.flat[self._device.tensor(index)] = self._device.tensor(pages)

    def entries_of(self, spans: IntArray, num_pages: int) -> npt.NDArray[np.int64]:
        """Return the indices [num_pages] into the flattened table that `write` would write to."""
        spans = spans.astype(np.int64)
        row, start, n = spans[:, 0], spans[:, 1], spans[:, 2]
        assert num_pages == int(n.sum()), "table_pages does not match table_spans"
        assert not len(row) or (int(row.max()) < self.max_rows and int((start + n).max()) <= self.max_pages)
        offset = row * self.max_pages + start - (np.cumsum(n) - n)
        return np.repeat(offset, n) + np.arange(num_pages)

    def entry_of(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the index into the flattened table of the entry with each token's page."""
        return rows * self.max_pages + positions // self.page_size

    def slots(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the KV slots [T] of tokens, from their table entries [T] and positions [T]; int64 on the
        device.
        """
        pages = self.flat[entries].long()
        return pages.mul_(self.page_size).add_(positions % self.page_size)
