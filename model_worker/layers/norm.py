"""Norms with a learned scale. Families differ in whether it multiplies before or after the rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_worker.distributed.cut import Cut
from model_worker.distributed.group import RankGroup
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import LANES
from model_worker.kernels.native.operators import Norm as NativeNorm
from model_worker.kernels.rms_norm import fused_add_rms_norm, rms_norm
from model_worker.layers.weight import Change, Weight


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, size] or [T, heads, size]."""
        ...

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """Add update, normed by update_norm if there is one, to residual in place and return the norm of the
        sum; all [T, size].
        """
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight. wide: the weight is float32 and multiplies before the result is rounded."""

    def __init__(
        self,
        size: int | Cut,
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
        self._native: NativeNorm | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this size."""
        if self.weight.shape[0] % LANES == 0:
            is_wide = self.weight.dtype is torch.float32
            self._native = NativeNorm(kernels, self.weight, self.eps, dtype=self._dtype, is_wide=is_wide)

    def forward(self, x: Tensor) -> Tensor:
        """See Norm."""
        if self._native is not None:
            return self._native(x)
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """See Norm."""
        if self._native is not None:
            return self._native(_normed(update, update_norm), residual)
        if type(update_norm) is type(self) is RMSNorm and update_norm.eps == self.eps:
            return fused_add_rms_norm(residual, update, self.weight, self.eps, update_norm.weight)
        return fused_add_rms_norm(residual, _normed(update, update_norm), self.weight, self.eps)


class SplitRMSNorm(RMSNorm):
    """An RMSNorm over a vector of which each rank has as much; elements that several have count as often.

    So the mean over all elements is the mean of the ranks' means.
    """

    def __init__(
        self,
        size: Cut,
        eps: float,
        *,
        group: RankGroup,
        dtype: torch.dtype,
        device: torch.device | str,
        wide: bool = False,
        changes: Sequence[Change] = (),
    ) -> None:
        super().__init__(size, eps, dtype=dtype, device=device, wide=wide, changes=changes)
        self._group = group

    def use_native(self, kernels: NativeKernels) -> None:
        """There is no kernel that stops in the middle for the other ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """See Norm; x is the rank's part."""
        wide = x.float()
        mean = self._group.all_reduce(wide.square().mean(-1, keepdim=True)) / self._group.size
        normed = wide * torch.rsqrt(mean + self.eps)
        if self.weight.dtype is torch.float32:
            return (self.weight * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """See Norm."""
        normed: Tensor = self(residual.add_(_normed(update, update_norm)))
        return normed


class LayerNorm(nn.Module):
    """(x - mean(x)) / deviation(x) * weight + bias. size (heads, head_dim): each head has its own."""

    def __init__(
        self,
        size: int | tuple[Cut, int],
        eps: float,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        changes: Sequence[Change] = (),
    ) -> None:
        super().__init__()
        self.eps = eps
        shape: tuple[int | Cut, ...] = (size,) if isinstance(size, int) else size
        self.weight = Weight(*shape, dtype=dtype, device=device, changes=changes)
        self.bias = Weight(*shape, dtype=dtype, device=device, changes=changes) if bias else None
        self._native: NativeNorm | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this size."""
        if self.weight.shape[-1] % LANES == 0:
            self._native = NativeNorm(
                kernels,
                self.weight,
                self.eps,
                dtype=self.weight.dtype,
                bias=self.bias,
                centers=True,
                is_wide=True,
            )

    def forward(self, x: Tensor) -> Tensor:
        """See Norm."""
        if self._native is not None:
            return self._native(x)
        if self.weight.dim() == 1:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight.float()
        return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """See Norm."""
        if self._native is not None:
            return self._native(_normed(update, update_norm), residual)
        normed: Tensor = self(residual.add_(_normed(update, update_norm)))
        return normed


def _normed(update: Tensor, norm: Norm | None) -> Tensor:
    return update if norm is None else norm(update)
