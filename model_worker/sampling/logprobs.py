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
    ranks: Tensor | None = None  # [m] int32 places of the chosen ids, where they were asked for

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return all tensors that there are as they were given."""
        parts = self.chosen, self.top_ids, self.top
        return parts if self.ranks is None else (*parts, self.ranks)


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int, *, ranks: bool = False) -> Logprobs:
    """Return the log-softmax of logits [m, V] float32 at tokens [m] int64 and at the num_top most likely
    ids; with ranks, also the places of the tokens.
    """
    num_top = min(num_top, logits.shape[1])
    logprobs = torch.log_softmax(logits, dim=1)
    _, top_ids = largest(logits, num_top)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))[:, 0]
    places = ranks_of(logits, tokens) if ranks else None
    return Logprobs(chosen, top_ids.int(), logprobs.gather(1, top_ids), places)


def ranks_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the places [m] int32 of tokens [m] int64, from 1, in the order of logits [m, V]: the largest
    first, equals by id.
    """
    tokens = tokens.unsqueeze(1)
    own = logits.gather(1, tokens)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((logits > own) | ((logits == own) & (ids < tokens))).sum(dim=1, dtype=torch.int32) + 1
