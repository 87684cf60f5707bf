"""Root-mean-square norm over the last dimension, alone or fused with the residual addition before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadNorms(NamedTuple):
    """Norms of each head of the queries and of the keys, by `rms_norm`; weights [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    x [..., N] of any float dtype. The norm is float32. A weight [N] of x's dtype multiplies the rounded norm,
    a float32 weight multiplies before the rounding.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype is torch.float32:
        return (weight * (wide * scale)).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def fused_add_rms_norm(
    residual: Tensor, update: Tensor, weight: Tensor, eps: float, update_weight: Tensor | None = None
) -> Tensor:
    """Add update, or its rms_norm by update_weight, to residual in place, then return rms_norm of the sum.
    All [..., N], weights [N].
    """
    residual.add_(update if update_weight is None else rms_norm(update, update_weight, eps))
    return rms_norm(residual, weight, eps)
