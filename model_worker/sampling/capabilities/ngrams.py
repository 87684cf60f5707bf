"""NGrams: forbids ids that would complete an n-gram for a second time."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.capabilities.token_history import TokenHistory
from model_worker.sampling.forbid import NO_ID, Forbidden, by_owner
from model_worker.sampling.step import SamplingStep
from runtime.sampling.features import NGRAM


class NGrams(SamplingCapability):
    bits = NGRAM

    def __init__(self, context: SamplerContext, history: TokenHistory) -> None:
        super().__init__(context)
        self._history = history

    def find(self, step: SamplingStep) -> Forbidden | None:
        """Return the ids that would complete an n-gram for a second time."""
        wary = step.rows_with(NGRAM)
        sizes = self._context.columns.host["ngram"][wary.rows_host]
        history = self._history.beginning(wary.rows, int(wary.positions_host.max()))
        on_device = self._context.device.tensor(sizes)
        return by_owner(wary.at, repeating_ids(history, wary.positions, on_device, int(sizes.max())))


def repeating_ids(history: Tensor, lengths: Tensor, sizes: Tensor, max_size: int) -> Tensor:
    """Return ids [n, L] int64 that would complete an n-gram for a second time, or NO_ID.

    history [n, L] int32, of which the first lengths [n] tokens are valid; sizes [n] int64: size of the
    n-grams; max_size: the largest. Token j is forbidden where the tokens before it equal the newest ones.
    """
    width = history.shape[1]
    at = torch.arange(width, device=history.device)
    found = (at < lengths.unsqueeze(1)) & (at >= sizes.unsqueeze(1) - 1)
    for k in range(1, min(max_size, width)):
        newest = history.gather(1, (lengths - k).clamp_min_(0).unsqueeze(1))
        same = history[:, : width - k] == newest
        found[:, k:].logical_and_(same | (sizes <= k).unsqueeze(1))
    return history.long().masked_fill_(~found, NO_ID)
