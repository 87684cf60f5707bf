"""Linear layers, plain or packed: one matrix for several of the checkpoint's that read the same input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_worker.layers.weight import Weight


class Linear(nn.Module):
    """y = x @ weight.T + bias.

    out_features is the width of the output, or the checkpoint's module names and their widths when the layer
    packs several: Linear(hidden, {"gate_proj": 704, "up_proj": 704}) gives both outputs side by side.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        parts = {} if isinstance(out_features, int) else dict(out_features)
        width = out_features if isinstance(out_features, int) else sum(out_features.values())
        self.weight = Weight(width, in_features, dtype=dtype, device=device, parts=parts)
        self.bias = Weight(width, dtype=dtype, device=device, parts=parts) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, width]."""
        return F.linear(x, self.weight, self.bias)
