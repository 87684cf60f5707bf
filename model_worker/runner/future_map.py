"""FutureMap: the last token of each row, on the device. It resolves an input id of -1 in a plan."""

from __future__ import annotations

import torch
from torch import Tensor


class FutureMap:
    """Last token of each row, last_token [max_rows + 1] int64; the last row is for the padding of a batch.
    One entry for each row is enough, because only a row's newest token can be unknown to the host, and work
    runs in stream order.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def resolve(self, input_ids: Tensor, at: Tensor, rows: Tensor) -> None:
        """Set input_ids[at[i]] to the last token of rows[i], in place; all [n] int64."""
        input_ids[at] = self.last_token[rows]

    def store(self, rows: Tensor, tokens: Tensor) -> None:
        """Store tokens [n] as the last ones of rows [n], both int64."""
        self.last_token[rows] = tokens
