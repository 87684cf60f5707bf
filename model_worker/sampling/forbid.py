"""Forbids single ids in rows of logits, except for rows that would have none left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NO_ID = -1
# Which row of logits, and which of its ids is forbidden, NO_ID for none: [N] int64 each.
Forbidden = tuple[Tensor, Tensor]


def by_owner(at: Tensor, ids: Tensor) -> Forbidden:
    """Make a Forbidden of ids [n, k] for rows at [n]."""
    return at.unsqueeze(1).expand_as(ids).flatten(), ids.flatten()


def forbid(logits: Tensor, owners: Tensor, ids: Tensor, rescued: Tensor | None) -> None:
    """Set logits[owners[i], ids[i]] to -inf in place, except in rows of `rescued` [n] that would have no
    finite logit left. owners, ids [N] and rescued are int64; an id may be NO_ID.
    """
    flat = logits.view(-1)
    index = owners * logits.shape[1] + ids.clamp_min(0)
    before = None if rescued is None else flat[index]
    # A minimum, not an assignment: an index may come several times, and NO_ID changes nothing.
    flat.scatter_reduce_(0, index, torch.where(ids >= 0, -math.inf, math.inf), "amin")
    if before is None or rescued is None:
        return
    empty = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    empty[rescued] = logits[rescued].amax(dim=1) == -math.inf
    flat.scatter_reduce_(0, index, before.masked_fill_(~empty[owners], -math.inf), "amax")
