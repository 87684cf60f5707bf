"""Root-mean-square norm over the last dimension, alone or fused with the residual addition before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each query head and each key head; weights [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, for x [..., N] of any float dtype.

    The norm is computed in float32. A weight [N] of x's dtype multiplies the rounded norm; a float32 weight
    is applied before rounding.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype is torch.float32:
        return (weight * (wide * scale)).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def fused_add_rms_norm(
    residual: Tensor, update: Tensor, weight: Tensor, eps: float, update_weight: Tensor | None = None
) -> Tensor:
    """Add update, or its rms_norm with update_weight, to residual in place, and return rms_norm of the sum.
    All are [..., N], weights [N].
    """
    residual.add_(update if update_weight is None else rms_norm(update, update_weight, eps))
    return rms_norm(residual, weight, eps)
