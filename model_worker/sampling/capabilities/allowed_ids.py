"""AllowedIds: restricts rows to some ids."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.step import SamplingStep
from runtime.sampling.features import ALLOWED
from runtime.wire.plan import RowSetup


class AllowedIds(SamplingCapability):
    """Forbids all ids but the allowed ones. forbidden [max_rows, vocab_size] bool, allocated when first
    needed.
    """

    bits = ALLOWED
    _forbidden: Tensor | None = None

    def open_row(self, setup: RowSetup) -> None:
        """Begin a stay of a row that needs this. See SamplingCapability."""
        context = self._context
        if self._forbidden is None:
            shape = (context.max_rows, context.vocab_size)
            self._forbidden = torch.zeros(shape, dtype=torch.bool, device=context.device.torch_device)
        forbidden = self._forbidden[setup.row]
        forbidden.fill_(True)
        ids = context.columns.known_ids(setup.allowed_ids)
        forbidden.index_fill_(0, context.device.tensor(ids.astype(np.int64)), False)

    def apply(self, logits: Tensor, step: SamplingStep) -> None:
        """Forbid all other ids, even if nothing is left."""
        assert self._forbidden is not None
        selected = step.rows_with(ALLOWED)
        logits[selected.at] = logits[selected.at].masked_fill_(self._forbidden[selected.rows], -math.inf)
