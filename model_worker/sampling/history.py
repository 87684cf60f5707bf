"""TokenHistory: the tokens of each row in their order, on the device, for what looks back at them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.sampling.columns import LongArray
from runtime.wire.format import IntArray

NO_TOKEN = -1


class TokenHistory:
    """tokens [max_rows, max_len] int32: prompt and output, NO_TOKEN for ids that the vocabulary lacks.

    Allocated with the first need: most runs never need it. A token is added on the stream that samples it, so
    the next step sees it whether or not the host does. How long a row's history is, its caller knows: as long
    as the position of the token to be sampled. What lies beyond is an earlier tenant's.
    """

    def __init__(self, max_rows: int, max_len: int, device: Device) -> None:
        self._shape = (max_rows, max_len)
        self._device = device
        self._tokens: Tensor | None = None

    def open_row(self, row: int, ids: IntArray) -> None:
        """Begin a stay with prompt and output so far."""
        if self._tokens is None:
            self._tokens = torch.full(
                self._shape, NO_TOKEN, dtype=torch.int32, device=self._device.torch_device
            )
        self._tokens[row, : len(ids)] = self._device.tensor(ids.astype(np.int32))

    def append(self, rows: Tensor, positions: Tensor, tokens: Tensor, positions_host: LongArray) -> None:
        """Add one sampled token for each of rows [n], which differ, at positions [n]; all int64."""
        assert self._tokens is not None
        assert int(positions_host.max()) < self._shape[1], "a token beyond the longest sequence"
        self._tokens[rows, positions] = tokens.int()

    def beginning(self, rows: Tensor, length: int) -> Tensor:
        """The first `length` tokens of rows [n]: [n, length] int32."""
        assert self._tokens is not None
        return self._tokens[:, :length].index_select(0, rows)

    def newest(self, rows: Tensor, lengths: Tensor, count: int) -> Tensor:
        """The last `count` tokens of rows [n] of lengths [n], the newest first: [n, count] int32; NO_TOKEN
        before the beginning.
        """
        assert self._tokens is not None
        at = lengths.unsqueeze(1) - 1 - torch.arange(count, device=lengths.device)
        tokens = self._tokens[rows.unsqueeze(1), at.clamp_min(0)]
        return tokens.masked_fill_(at < 0, NO_TOKEN)
