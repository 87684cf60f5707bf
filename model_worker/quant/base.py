"""QuantMethod: what a linear layer asks about its weight, so that the layer names no method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from model_worker.kernels.native.library import NativeKernels

Multiply = Callable[[Tensor], Tensor]
"""x [T, K] -> [T, N], of one weight."""


class QuantMethod(Protocol):
    """How weights [N, K] of linear layers are stored and applied. One object serves a whole model."""

    stored: torch.dtype | None
    """What the checkpoint's own weights must be to be loaded as they are, with a float32 scale for each of N
    outputs; None: weights are loaded in the model's dtype."""

    def can_store(self, weight: Tensor) -> bool:
        """Whether a weight of this shape, [N, K] or of experts [E, N, K], can be kept as `stored`."""
        ...

    def compress(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """What to keep of a loaded weight instead, and its scales [N, 1] float32; None: it stays as it is."""
        ...

    def apply(self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N] of x's dtype, with torch operations. scale [N, 1] where there is one."""
        ...

    def native(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Multiply | None:
        """The same by a C++ kernel for x of dtype, whose rows give the same bits in any batch; None: there is
        no kernel for this shape on this CPU. The weight may be rearranged in place: nothing else may read it.
        """
        ...
