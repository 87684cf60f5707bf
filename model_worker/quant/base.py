"""QuantMethod: how a linear layer keeps its weight, so that the layer names no method. An Ops multiplies with
it, by the dtype that it then has.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class QuantMethod(Protocol):
    """Way in which weights [N, K] of linear layers are stored. One object serves a whole model."""

    stored: torch.dtype | None
    """Dtype that the checkpoint's own weights must have to be loaded as they are, with a float32 scale for
    each of N outputs; None: weights are loaded in the model's dtype."""

    def can_store(self, weight: Tensor) -> bool:
        """Tell whether a weight of this shape, [N, K] or of experts [E, N, K], can be kept as `stored`."""
        ...

    def compress(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what to keep of a loaded weight instead, and its scales [N, 1] float32; None: it stays as it
        is.
        """
        ...
