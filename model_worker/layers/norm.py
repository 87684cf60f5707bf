"""Norms with a learned scale. Model families differ in whether the scale is applied before or
after rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_worker.distributed.cut import Cut
from model_worker.distributed.group import RankGroup
from model_worker.layers.bound import BoundLayer
from model_worker.layers.weight import Change, Weight
from model_worker.ops.base import Norm, Ops
from model_worker.ops.torch_ops import StepwiseNorm


class NormLayer(BoundLayer):
    """Normalises the last dimension; see Norm."""

    op: Norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, size] or [T, heads, size]."""
        return self.op(x)

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: NormLayer | None = None) -> Tensor:
        """Add update, normed by update_norm if given, to residual in place, and return the norm of the sum;
        all [T, size].
        """
        return self.op.add_and_norm(residual, update, None if update_norm is None else update_norm.op)


class RMSNorm(NormLayer):
    """RMS norm: x / rms(x) * weight. wide: the weight is float32 and is applied before rounding."""

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

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        self.op = ops.rms_norm(self.weight, self.eps, self._dtype)


class SplitRMSNorm(RMSNorm):
    """RMSNorm over a vector that is divided evenly among ranks. Elements that several ranks have count as
    often.

    So the mean over all elements is the mean of the ranks' means. No kernel stops in the middle for the other
    ranks, so this is computed by torch.
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

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        self.op = StepwiseNorm(self._norm)

    def _norm(self, x: Tensor) -> Tensor:
        """Return the norm of x, the rank's part."""
        wide = x.float()
        mean = self._group.all_reduce(wide.square().mean(-1, keepdim=True)) / self._group.size
        normed = wide * torch.rsqrt(mean + self.eps)
        if self.weight.dtype is torch.float32:
            return (self.weight * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class LayerNorm(NormLayer):
    """Layer norm: (x - mean(x)) / deviation(x) * weight + bias. size (heads, head_dim): each head has weights
    of its own.
    """

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

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        self.op = ops.layer_norm(self.weight, self.bias, self.eps)
