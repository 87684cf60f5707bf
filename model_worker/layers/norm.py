"""RMSNorm with its learned scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import LANES
from model_worker.kernels.native.operators import RmsNorm as NativeRmsNorm
from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.layers.weight import Weight


class RMSNorm(nn.Module):
    """Normalises the last dimension, `size` wide."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Weight(size, dtype=dtype, device=device)
        self._native: NativeRmsNorm | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this size."""
        if self.weight.shape[0] % LANES == 0:
            self._native = NativeRmsNorm(kernels, self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [T, size] or [T, heads, size]."""
        if self._native is not None:
            return self._native(x)
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, residual: Tensor, update: Tensor) -> Tensor:
        """Add update to residual in place and return the norm of the sum; all [T, size]."""
        if self._native is not None:
            return self._native(update, residual)
        return fused_add_rms_norm(residual, update, self.weight, self.eps)
