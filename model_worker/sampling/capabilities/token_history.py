"""TokenHistory: tokens of rows in order, on the device, for capabilities that need earlier tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.sampling.features import HISTORY
from runtime.wire.format import unpack_ids
from runtime.wire.plan import RowSetup

NO_TOKEN = -1


class TokenHistory(SamplingCapability):
    """Keeps tokens [max_rows, max_len] int32: prompt and output, NO_TOKEN for ids outside the vocabulary.

    Allocated when first needed, since most launches never need it. A token is added on the stream that
    samples it. A reader must know the length of a row's history, which is the position of the token to be
    sampled; tokens beyond it are an earlier holder's.
    """

    bits = remembered = HISTORY
    _tokens: Tensor | None = None

    def open_row(self, setup: RowSetup) -> None:
        """Store prompt and output so far."""
        context = self._context
        if self._tokens is None:
            shape = (context.max_rows, context.max_len)
            self._tokens = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=context.device.torch_device)
        ids = unpack_ids(setup.history_ids)
        ids = np.where(context.columns.known(ids), ids, NO_TOKEN)
        self._tokens[setup.row, : len(ids)] = context.device.tensor(ids.astype(np.int32))

    def remember(self, step: SamplingStep, sampled: StepSample) -> None:
        """Append the sampled tokens."""
        assert self._tokens is not None
        selected = step.rows_with(HISTORY)
        assert int(selected.positions_host.max()) < self._context.max_len, (
            "a token beyond the longest sequence"
        )
        self._tokens[selected.rows, selected.positions] = sampled.tokens[selected.at].int()

    def beginning(self, rows: Tensor, length: int) -> Tensor:
        """Return the first `length` tokens of rows [n], [n, length] int32."""
        assert self._tokens is not None
        return self._tokens[:, :length].index_select(0, rows)

    def newest(self, rows: Tensor, lengths: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens of rows [n] with lengths [n], the newest first, [n, count] int32;
        NO_TOKEN before the beginning.
        """
        assert self._tokens is not None
        at = lengths.unsqueeze(1) - 1 - torch.arange(count, device=lengths.device)
        tokens = self._tokens[rows.unsqueeze(1), at.clamp_min(0)]
        return tokens.masked_fill_(at < 0, NO_TOKEN)
