"""Lookup of token ids in an embedding table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(ids: Tensor, weight: Tensor, *, first: int | None = None, scale: float = 1.0) -> Tensor:
    """Return the rows [T, H] of weight [N, H] for ids [T] int64, times scale, rounded. first: id of row 0;
    ids that weight has no row for give zeros. None: weight has every id, from 0 on.
    """
    if first is None:
        rows = F.embedding(ids, weight)
    else:
        local = ids - first
        nearest = local.clamp(0, len(weight) - 1)
        rows = F.embedding(nearest, weight).mul_((nearest == local).unsqueeze(1))
    return rows if scale == 1.0 else rows.mul_(scale)


def embed_int8(
    ids: Tensor,
    weight: Tensor,
    row_scale: Tensor,
    *,
    dtype: torch.dtype,
    first: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Do what `embed` does for a table of weight [N, H] int8 times row_scale [N] float32, rounded
    to dtype.
    """
    last = len(weight) - 1
    local = ids if first is None else ids - first
    nearest = local.clamp(0, last)
    rows = (F.embedding(nearest, weight) * row_scale[nearest].unsqueeze(1)).to(dtype)
    if first is not None:
        rows.mul_((nearest == local).unsqueeze(1))
    return rows if scale == 1.0 else rows.mul_(scale)
