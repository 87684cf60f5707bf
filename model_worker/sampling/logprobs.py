"""Logprobs: log-softmax of raw logits at some ids. Knows no row and no position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.sampling.truncation import largest


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of m positions, in order."""

    chosen: Tensor  # [m] float32
    top_ids: Tensor  # [m, num_top] int32, most likely first
    top: Tensor  # [m, num_top] float32

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all three tensors as they were given."""
        return self.chosen, self.top_ids, self.top


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return the log-softmax of logits [m, V] float32 at tokens [m] int64 and at the num_top most
    likely ids.
    """
    num_top = min(num_top, logits.shape[1])
    logprobs = torch.log_softmax(logits, dim=1)
    _, top_ids = largest(logits, num_top)
    return Logprobs(logprobs.gather(1, tokens.unsqueeze(1))[:, 0], top_ids.int(), logprobs.gather(1, top_ids))
