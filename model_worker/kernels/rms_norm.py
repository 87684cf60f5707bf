"""Root-mean-square norm over the last dimension, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    x [..., N] of any float dtype, weight [N] of the same. The norm is float32; the product is in x's dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def fused_add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add update to residual in place, then return rms_norm of the sum. All [..., N], weight [N]."""
    residual.add_(update)
    return rms_norm(residual, weight, eps)
