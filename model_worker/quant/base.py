"""QuantMethod: interface for the storage format of a linear layer's weight, so that the layer names no
format. An Ops chooses the product by the stored dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class QuantMethod(Protocol):
    """Storage format of the weights [N, K] of linear layers. One object serves a whole model."""

    stored: torch.dtype | None
    """Dtype that the checkpoint's own weights must have to be loaded unchanged, with a float32 scale for each
    of N outputs; None: weights are loaded in the model's dtype.
    """

    def can_store(self, weight: Tensor) -> bool:
        """Return True if a weight of this shape, [N, K] or of experts [E, N, K], can be stored
        as `stored`.
        """
        ...

    def compress(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (weight, scales [N, 1] float32) to keep instead of a loaded weight; None: keep
        it unchanged.
        """
        ...
