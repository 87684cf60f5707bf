"""Norms with a learned scale. Families differ in whether it multiplies before or after the rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import LANES
from model_worker.kernels.native.operators import RmsNorm as NativeRmsNorm
from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.layers.weight import Change, Weight


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, size] or [T, heads, size]."""
        ...

    def add_and_norm(self, residual: Tensor, update: Tensor) -> Tensor:
        """Add update to residual in place and return the norm of the sum; all [T, size]."""
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight. wide: the weight is float32 and multiplies before the result is rounded."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        wide: bool = False,
        changes: Sequence[Change] = (),
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Weight(size, dtype=torch.float32 if wide else dtype, device=device, changes=changes)
        self._dtype = dtype
        self._native: NativeRmsNorm | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this size and dtype."""
        if self.weight.shape[0] % LANES == 0 and self.weight.dtype is self._dtype:
            self._native = NativeRmsNorm(kernels, self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """See Norm."""
        if self._native is not None:
            return self._native(x)
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, residual: Tensor, update: Tensor) -> Tensor:
        """See Norm."""
        if self._native is not None:
            return self._native(update, residual)
        return fused_add_rms_norm(residual, update, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / deviation(x) * weight + bias. size (heads, head_dim): each head has its own."""

    def __init__(
        self,
        size: int | tuple[int, int],
        eps: float,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        changes: Sequence[Change] = (),
    ) -> None:
        super().__init__()
        self.eps = eps
        shape = (size,) if isinstance(size, int) else size
        self.weight = Weight(*shape, dtype=dtype, device=device, changes=changes)
        self.bias = Weight(*shape, dtype=dtype, device=device, changes=changes) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """See Norm."""
        if self.weight.dim() == 1:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight.float()
        return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)

    def add_and_norm(self, residual: Tensor, update: Tensor) -> Tensor:
        """See Norm."""
        normed: Tensor = self(residual.add_(update))
        return normed
