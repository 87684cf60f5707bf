"""RMSNorm with its learned scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.layers.weight import Weight


class RMSNorm(nn.Module):
    """Normalises the last dimension, `size` wide."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Weight(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, residual: Tensor, update: Tensor) -> Tensor:
        """Add update to residual in place and return the norm of the sum; all [T, size]."""
        return fused_add_rms_norm(residual, update, self.weight, self.eps)
